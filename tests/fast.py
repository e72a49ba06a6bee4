"""`make test-fast`: for every room some of its tests, two minutes in all on two quiet cores.

A change needs `make test` as well. These tell early that something is broken, and where.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# By room, and by the files that stand beside the rooms: tests, as pytest names them.
FAST = {
    "weft": ["test_structure.py", "test_versions.py", "test_docs.py"],
    "collectives": [
        "test_collectives.py::test_misuse_is_an_error_on_every_rank",
        "test_hosts.py::test_rows_cross_once",
    ],
    "collectives/ranks": [
        "test_collectives.py::test_chunk_sizes_are_those_of_torch",
        "test_flight.py::test_the_ring_holds_the_last_calls_only",
    ],
    "collectives/interpreted": ["test_fast_integers.py"],
    "collectives/device": ["test_signals.py"],
    "collectives/memory": ["test_workspace.py"],
    "collectives/prices": ["test_closed_forms.py"],
    "collectives/kernels": ["test_kernel_collectives.py::test_one_and_two_shots"],
    "kernels": ["test_matmul_ops.py::test_misuse_is_an_error_on_every_rank"],
    "kernels/engine": ["test_engines.py"],
    "kernels/device": ["test_partial_sums.py::test_slots_are_added_up_in_order"],
    "kernels/matmul": [
        f"test_kernels_triton.py::test_against_float64[{case}-2]"
        for case in ("gather_rows", "gather_contraction", "reduce_scatter", "all_reduce")
    ],
    "kernels/experts": ["test_experts.py::test_experts_that_several_ranks_share"],
    "kernels/expert_kernels": ["test_expert_kernels.py::test_against_float64[dispatching-2]"],
    "kernels/norm": ["test_normalized_sum.py::test_the_launch_suits_the_chip"],
    "kernels/flash": ["test_ring_attention.py::test_a_late_rank"],
    "kernels/heads": ["test_head_exchange.py::test_a_rank_without_heads"],
    "kernels/attention": ["test_flash_decode.py::test_caches_of_fp8"],
    "kernels/layers": ["test_parallel_linear.py::test_training_equals_one_process"],
    "kernels/graphs": ["test_compile_pass.py::test_strict_tells_what_was_missed"],
    "kernels/compile": ["test_aot.py::test_an_unknown_arch_is_refused"],
    "dtensor": ["test_notation.py", "test_dtensor_api.py"],
    "dtensor/layout": ["test_layout.py"],
    "dtensor/tracing": ["test_dtensor_training.py::test_inference_mode_comes_first"],
    "dtensor/move": ["test_dtensor_redistribute.py::test_all_pairs"],
    "dtensor/checkpoint": ["test_checkpoint.py::test_into_other_layouts_and_numbers_of_ranks"],
    "dtensor/dispatch": ["test_dtensor_dispatch.py", "test_discovery.py::test_rules_are_found"],
    "dtensor/rules": [
        f"test_dtensor_ops.py::test_family[{family}-3]"
        for family in ("pointwise", "reductions", "views", "matmuls", "layers")
    ],
    "dtensor/fused": ["test_parallel.py::test_sequence_parallel_mlp_is_the_plain_one"],
    "dtensor/plans": ["test_plan.py::test_the_search_is_exact"],
    "dtensor/interop": ["test_optimizer_step.py::test_a_step_is_that_of_one_process"],
    "sim": ["test_sim.py::test_results_come_in_rank_order"],
    "sim/check": ["test_sim_races.py::test_a_hand_over_with_a_fault"],
    "sim/hooks": ["test_sim_time.py::test_this_triton_fits"],
    "sim/run": ["test_solo.py::test_larger_worlds"],
    "sim/schedule": ["test_sim_replay.py::test_systematic_schedules"],
    "sim/time": ["test_sim_time.py::test_two_ranks_by_hand"],
    "bench": ["test_bench.py::test_what_is_wrong_has_no_time"],
    "bench/blocks": ["test_bench_scaling.py::test_rows_are_kept_and_become_a_page"],
    "bench/suites": ["test_bench_scaling.py"],
    "bench/report": ["test_bench.py::test_old_files_are_refused"],
    "bench/commands": ["test_bench_commands.py::test_doctor_knows_what_weft_reads"],
    "bench/published": ["test_published.py"],
    "bench/host": ["test_bench_host.py"],
    "bench/solo": ["test_solo.py::test_rates_of_tiles_follow_from_the_figures"],
}


def arguments() -> list[str]:
    """All of them, for pytest."""
    return [str(found(test)) for tests in FAST.values() for test in tests]


def found(test: str) -> Path:
    """Where a test is: in the folder of what it tests."""
    file, colons, name = test.partition("::")
    (path,) = HERE.glob(f"*/{file}")
    return Path(f"{path}{colons}{name}")


if __name__ == "__main__":
    import pytest

    sys.path[0] = str(HERE.parent)  # in tests/, `weft` and `tools` would be the folders of theirs
    sys.exit(pytest.main([*sys.argv[1:], "-m", "not slow and not sweep and not gpu", *arguments()]))
