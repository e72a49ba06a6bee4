/* A CUDA driver that runs nothing: what Triton's launcher calls, and where its launches end up. */
#include <stdint.h>
#include <string.h>

typedef void (*Hook)(void *function, void **parameters);
static Hook hook;
static uint64_t functions;

void stub_on_launch(Hook told) { hook = told; }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "the stub refuses"; return 0; }
int cuCtxGetCurrent(void **context) { *context = &functions; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &functions; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 97 ? 232448 : 1 << 20; /* shared memory that a block may ask for */
  return 0;
}
int cuModuleLoadData(void **module, const void *image) { *module = (void *)image; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)++functions;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0; /* the most threads of a block */
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) {
  *count = 1;
  return 0;
}
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
  *(uint64_t *)value = pointer;
  return 0;
}

/* What the real one refuses of matrices, and a map that tells what it is of. */
int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, uint64_t address,
                           const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                           const uint32_t *steps, int interleave, int swizzle, int promotion,
                           int fill) {
  if (rank != 2 || address % 16 || strides[0] % 16 || box[0] > 256 || box[1] > 256) return 1;
  memset(map, 0, 128);
  map[0] = address, map[1] = sizes[0], map[2] = sizes[1], map[3] = strides[0];
  return 0;
}

int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
  if (hook) hook(function, parameters);
  return 0;
}
