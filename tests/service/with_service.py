"""Runs suites under a service: `pytest -p tests.service.with_service tests/conformance tests/journeys`.

The service is started for the run, and `AIONN_SERVICE` names its socket, so that each runtime of each test attaches to it. Left out are
the tests in `LEFT_OUT`, each with its reason.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from aionn.remote.attaching import VARIABLE
from tests.service.served import Served, serving

DRIVERS = "it looks for drivers among the processes of the app, or kills or restarts them"
ENVIRONMENT = "it gives its driver variables, or steers the fake device by them, and a service has an environment of its own"
RECORDS = "it moves, reads or loses the records of its drivers, which lie in the service's state directory"
FILES = "it lends a file as memory, which a driver of several apps refuses, because its sender could cut the file off"
OPENER = "it looks at a task that begins only when the app has attached"
CALLS = "it counts the calls to its driver, or expects the errors of a driver that takes other memory"

LEFT_OUT = {
    "conformance/test_app_memory.py": {
        "test_a_file_is_read_and_written_in_place": FILES,
        "test_a_file_that_is_cut_off_is_told_and_hurts_nobody": FILES,
        "test_memory_that_is_mapped_read_only_is_no_output": FILES,
        "test_one_file_as_two_memories_is_still_one_file": FILES,
        "test_set_input_and_output_from_memory_of_every_type": FILES,
    },
    "conformance/test_execution_paths.py": {"test_memory_domains_on_the_fenced_way[reference-mmap_fd]": FILES},
    "conformance/test_lent_files.py": {"test_a_driver_opens_no_file_of_the_cache_directory": ENVIRONMENT},
    "conformance/test_memory_domains_runtime.py": {
        "test_a_device_that_fails_answers_with_an_error_and_never_with_a_fallback": ENVIRONMENT,
        "test_a_use_after_a_cancelled_copy_waits_for_the_driver": DRIVERS,
    },
    "conformance/test_memory_lifetimes.py": {
        "test_a_caller_that_leaves_does_not_leave_half_a_turn": ENVIRONMENT,
        "test_a_failed_execution_leaves_a_state_as_it_was_and_empties_what_it_only_writes": ENVIRONMENT,
        "test_allocate_use_free_leaves_nothing_on_either_side": DRIVERS,
        "test_apps_killed_at_random_leave_nothing": DRIVERS,
        "test_drivers_killed_at_random_leave_nothing": DRIVERS,
        "test_lies_about_memory_are_refused_one_by_one_and_hurt_nobody": CALLS,
    },
    "conformance/test_never_stale.py": {
        f"test_the_outputs_are_those_of_the_model_as_it_is_now[{case}": reason
        for case, reason in {
            "The engine gets another version": ENVIRONMENT,
            "The engine asks for more files": ENVIRONMENT,
            "The engine did not want the model stored": ENVIRONMENT,
            "The driver is restarted": DRIVERS,
            "The records of the drivers are moved along with the cache": RECORDS,
            "The records of the drivers are lost": RECORDS,
        }.items()
    },
    "conformance/test_partitioning.py": {
        "test_cache_tokens_of_steps_differ_by_device_version": ENVIRONMENT,
        "test_failing_driver_after_a_loop_does_not_loop_forever": ENVIRONMENT,
        "test_failing_driver_simple_plan": ENVIRONMENT,
    },
    "conformance/test_validation_rows.py": {
        "test_a_copy_that_the_driver_cannot_read_leaves_the_memory_empty": FILES,
        "test_device_memory_set_input_from_memory": ENVIRONMENT,
    },
    "journeys/test_bad_input.py": {"test_a_device_whose_package_is_not_installed_says_what_is_missing": ENVIRONMENT},
    "journeys/test_cache_journey.py": {
        "test_a_declined_model_is_declined_from_then_on": ENVIRONMENT,
        "test_a_driver_killed_while_it_compiles_lets_the_next_caller_compile": ENVIRONMENT,
        "test_a_driver_that_crashes_over_a_cached_entry_is_replaced_and_the_model_compiled": ENVIRONMENT,
        "test_a_driver_that_hangs_over_a_cached_entry_leaves_time_to_compile": ENVIRONMENT,
        "test_a_miss_then_hits_and_a_hit_does_not_send_the_model": CALLS,
        "test_a_new_driver_after_a_death_prepares_from_the_cache": CALLS,
        "test_a_state_directory_that_is_not_the_drivers_own_costs_the_cache_alone": RECORDS,
        "test_a_writer_waits_for_a_reader_and_no_reader_begins_while_it_waits": ENVIRONMENT,
        "test_records_that_are_lost_cost_a_compilation": RECORDS,
        "test_two_versions_of_an_engine_under_one_user_compile_once_each_and_hit_from_then_on": ENVIRONMENT,
        "test_when_the_compiling_app_is_killed_half_way_another_takes_over": ENVIRONMENT,
    },
    "journeys/test_cancelled_caller.py": {
        "test_a_cancelled_compilation_leaves_the_runtime_able_to_compile": DRIVERS,
        "test_a_cancelled_compute_leaves_both_paths_right_and_every_slot_free": DRIVERS,
    },
    "journeys/test_cancelled_cleanup.py": {
        "test_a_device_memory_whose_closing_is_cancelled_is_freed": ENVIRONMENT,
        "test_a_swap_that_is_cancelled_while_it_leaves_the_cache_releases_the_new_model": ENVIRONMENT,
        "test_a_staged_compilation_whose_closing_is_cancelled_leaves_no_model_and_no_worker": ENVIRONMENT,
    },
    "journeys/test_closing.py": {
        "test_an_app_that_forgets_to_close_its_runtime_leaves_no_driver_and_hears_nothing_of_asyncio": DRIVERS,
        "test_an_opener_that_is_cancelled_while_it_opens_leaves_a_closed_runtime": OPENER,
        "test_cancelling_the_runtimes_own_tasks_kills_its_drivers_and_ends_in_time": DRIVERS,
        "test_no_error_of_a_queue_reaches_an_app_when_a_driver_ends_a_burst": DRIVERS,
    },
    "journeys/test_confined_files.py": {
        "test_a_driver_opens_no_file_of_the_user": DRIVERS,
        "test_the_trace_shows_what_a_hostile_engine_opens": DRIVERS,
    },
    "journeys/test_confined_processes.py": {"test_a_worker_in_the_background_is_confined": ENVIRONMENT},
    "journeys/test_confined_storms.py": {
        "test_killed_apps_leave_no_confined_driver": DRIVERS,
        "test_killed_confined_drivers_leave_nothing_and_the_next_start_works": DRIVERS,
    },
    "journeys/test_forgotten_burst.py": {
        "test_a_burst_that_is_dropped_is_collected_and_leaves_nothing_here_or_in_the_driver": ENVIRONMENT,
    },
    "journeys/test_forking_app.py": {"test_a_child_of_fork_touches_nothing_of_its_parents": ENVIRONMENT},
    "journeys/test_interrupted_app.py": {
        "test_a_driver_ends_with_its_app_although_another_process_holds_the_socket_open": DRIVERS,
        "test_a_second_interrupt_while_the_runtime_closes_is_one_keyboard_interrupt": ENVIRONMENT,
        "test_an_app_that_is_ended_leaves_no_driver": DRIVERS,
    },
    "journeys/test_killed_driver.py": {
        "test_a_compilation_outlives_its_driver": DRIVERS,
        "test_a_driver_killed_while_it_starts_or_prepares_ends_the_compilation": DRIVERS,
        "test_every_call_that_waits_for_a_killed_driver_is_told_and_the_next_use_starts_a_new_one": DRIVERS,
        "test_leaving_the_runtime_while_calls_wait_ends_them_in_bounded_time": DRIVERS,
        "test_the_death_of_one_driver_does_not_touch_the_others": DRIVERS,
    },
    "journeys/test_model_journey.py": {
        "test_the_driver_keeps_no_mapping_of_the_apps_constants": DRIVERS,
        "test_two_models_share_one_driver": DRIVERS,
    },
    "journeys/test_overwritten_weights.py": {
        "test_weights_that_change_and_change_back_before_they_are_compiled_are_not_stored": ENVIRONMENT,
        "test_weights_that_change_and_change_back_while_they_are_compiled_are_stored_as_they_were_copied": ENVIRONMENT,
    },
    "journeys/test_state_folder.py": {
        "test_a_runtimes_drivers_keep_their_records_in_its_own_folder": RECORDS,
        "test_a_stage_that_a_background_worker_made_is_recorded_in_the_runtimes_own_folder": ENVIRONMENT,
        "test_records_lost_with_a_cache_that_survives_are_one_warning_with_the_folder_and_the_way_out": RECORDS,
    },
    "journeys/test_weights_cut_off.py": {
        "test_a_file_that_is_cut_before_it_is_read_is_a_compilation_error_and_the_driver_lives": ENVIRONMENT,
        "test_a_file_that_is_spoiled_during_a_compilation_changes_nothing": ENVIRONMENT,
    },
    "journeys/test_wrong_declarations.py": {
        "test_a_state_of_a_batch_that_the_output_denies_lives_in_the_driver_once_that_is_known": DRIVERS,
    },
}
"""By file in `tests`, and by the beginning of a test's name."""


def left_out(nodeid: str) -> str:
    """Why that test is left out, or an empty text."""
    file, _, name = nodeid.removeprefix("tests/").partition("::")
    for begin, reason in LEFT_OUT.get(file, {}).items():
        if name == begin or name.startswith((f"{begin}[", f"{begin}-")):
            return reason
    return ""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # the workers have the environment of their controller
        return
    with ExitStack() as undo:
        folder = undo.enter_context(serving())
        served = Served(folder)
        undo.callback(served.end)
        os.environ[VARIABLE] = served.path
        undo.callback(os.environ.pop, VARIABLE)
        config.add_cleanup(undo.pop_all().close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := left_out(item.nodeid):
            item.add_marker(pytest.mark.skip(reason))
