"""`DeviceMesh`, under the name that `torch.distributed.tensor.device_mesh` has it."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
