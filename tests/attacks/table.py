"""The attacks of the first review, and the tests that hold what became of them.

A row has a number, the attack, and tests, as ``folder/test_file.py::test_name`` below ``tests/``.
`tests/attacks/test_table.py` holds that each of them is there. `MORE` has attacks on what was built
after that review; others beyond these are the other tests of this folder.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ATTACKS", "MORE", "PROMISES", "Attack"]


@dataclass(frozen=True, slots=True)
class Attack:
    """One row."""

    number: int
    attack: str
    tests: tuple[str, ...]


PLAIN = "storage/chunks/test_plain_files.py"
ODD = "storage/commit/test_odd_file_systems.py"
PROCESS = "attacks/test_process.py"
RANKS = "attacks/test_ranks.py::test_a_rank_is_struck"
BUCKETS = "attacks/test_buckets.py"
BACKGROUND = "engine/test_background.py"
LEFTOVERS = "storage/commit/test_leftovers.py"
BOUNDS = "storage/test_bounds.py"
BAD = "mistakes/test_bad_input.py"
PICKLES = "formats/torch_save/test_pickle_machine.py"
ARCHIVES = "formats/torch_save/test_archive.py"
PATHS = "attacks/test_paths.py"
HOSTILE = "attacks/test_hostile.py"

_ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Faults at run time.
    (
        "a chunk is truncated during a load, load_into, verify",
        (f"{PLAIN}::test_what_happens_to_a_file_while_it_is_read", f"{HOSTILE}::test_files_shrink"),
    ),
    ("the same, unmapped", (f"{HOSTILE}::test_files_shrink",)),
    ("EIO of the disk", (f"{PLAIN}::test_what_happens_to_a_file_while_it_is_read",)),
    ("EIO, ESTALE of a network", (f"{PLAIN}::test_what_happens_to_a_file_while_it_is_read",)),
    (
        "a torch.save file is truncated during a conversion",
        ("formats/torch_save/test_source.py::test_a_file_that_was_cut_off_meanwhile",),
    ),
    ("disk full: save, overwrite", (f"{BAD}::test_a_full_disk",)),
    ("disk full, many leaves", (f"{BAD}::test_a_full_disk", f"{ODD}::test_calls_that_fail")),
    ("disk full in convert", ("convert/test_resuming.py::test_a_failure_keeps_what_was_written",)),
    (
        "RLIMIT_FSIZE",
        (f"{BAD}::test_files_that_may_not_grow", f"{PROCESS}::test_it_works_or_is_refused_by_name"),
    ),
    ("EIO, EDQUOT, ESTALE, EACCES of each call", (f"{ODD}::test_calls_that_fail",)),
    ("EIO while removing", (f"{ODD}::test_what_cannot_be_removed",)),
    ("no fsync of folders", (f"{ODD}::test_a_save_and_an_overwrite",)),
    ("no locks", (f"{ODD}::test_a_save_and_an_overwrite",)),
    ("no exchange", (f"{ODD}::test_a_save_and_an_overwrite",)),
    (
        "few open files",
        (f"{PROCESS}::test_it_works_all_the_same", f"{BAD}::test_no_more_open_files"),
    ),
    ("little address space", (f"{PROCESS}::test_little_address_space",)),
    (
        "SIGINT in a save, overwrite, load",
        (
            f"{PROCESS}::test_a_signal_ends_it",
            "storage/commit/test_staging.py::test_a_failed_save_leaves_what_was_there",
            "attacks/test_states.py::test_callbacks_that_raise_anything",
        ),
    ),
    ("SIGINT after save_async", (f"{PROCESS}::test_it_works_all_the_same",)),
    ("own handlers of signals", (f"{PROCESS}::test_it_works_all_the_same",)),
    ("SIGTERM", (f"{PROCESS}::test_a_signal_ends_it",)),
    ("SIGINT in convert", (f"{HOSTILE}::test_a_conversion_is_interrupted",)),
    # Ranks.
    ("SIGKILL of a rank", (RANKS, "torch/test_group.py::test_a_killed_rank_is_noticed_at_once")),
    ("a rank raises in a callback", (RANKS,)),
    ("SIGINT, SIGTERM, SystemExit on a rank", (RANKS,)),
    ("SIGSTOP of a rank in a save", (RANKS,)),
    ("SIGSTOP of a rank in a load", (RANKS,)),
    ("the same, reads not shared", (RANKS,)),
    (
        "a rank is late",
        (RANKS, "torch/test_waiting.py::test_a_timeout_names_the_silent_rank_on_all"),
    ),
    ("what killed ranks leave", ("attacks/test_ranks.py::test_nothing_stays_of_killed_ranks",)),
    # S3, and GCS.
    ("503 at 5, 20, 50%", (f"{BUCKETS}::test_refusals_that_pass",)),
    ("500, 429, RequestTimeout, ... always", (f"{BUCKETS}::test_refusals_that_stay",)),
    ("403, ExpiredToken, 301", (f"{BUCKETS}::test_refusals_that_stay",)),
    (
        "501, for all or for conditional writes",
        (f"{BUCKETS}::test_refusals_that_stay", f"{BUCKETS}::test_no_conditional_writes"),
    ),
    ("resets, half bodies, lost answers", (f"{BUCKETS}::test_losses",)),
    ("flipped bits, short bodies", (f"{BUCKETS}::test_wrong_bodies",)),
    (
        "another ETag each time, ranges ignored",
        (f"{BUCKETS}::test_etags_that_differ_each_time", f"{BUCKETS}::test_ranges_are_ignored"),
    ),
    ("stale listings", (f"{BUCKETS}::test_a_stale_listing",)),
    ("no permission to list", (f"{BUCKETS}::test_listing_is_forbidden",)),
    ("no permission to delete", (f"{BUCKETS}::test_deleting_is_forbidden",)),
    ("a dead endpoint", (f"{BUCKETS}::test_a_dead_endpoint",)),
    ("an endpoint that never answers", (f"{BUCKETS}::test_an_endpoint_that_never_answers",)),
    ("stalls and trickles", (f"{BUCKETS}::test_slow_answers",)),
    # Concurrency.
    (
        "three writers and a reader",
        (
            "api/test_crash.py::test_savers_that_race",
            "api/test_crash.py::test_many_writers_and_a_reader",
        ),
    ),
    (
        "several first saves",
        (
            f"{PATHS}::test_many_threads_save_to_one_path",
            "storage/test_buckets.py::test_only_one_of_two_fresh_saves_begins",
        ),
    ),
    (
        "several overwrites without exchange, in a bucket",
        (
            "api/test_crash.py::test_many_writers_and_a_reader",
            "storage/test_buckets.py::test_only_one_of_two_overwrites_commits",
        ),
    ),
    (
        "threads and asynchronous saves to one path",
        (
            f"{PATHS}::test_many_threads_save_to_one_path",
            f"{BACKGROUND}::test_saves_to_one_path_follow_each_other",
        ),
    ),
    (
        "exits and exceptions during an asynchronous save",
        (
            f"{BACKGROUND}::test_the_interpreter_waits_for_a_save",
            f"{BACKGROUND}::test_an_unseen_failure_is_logged_at_the_end",
        ),
    ),
    ("os._exit during one", (f"{PROCESS}::test_a_process_ends_while_it_saves",)),
    ("fork during one", (f"{BACKGROUND}::test_a_forked_child_does_not_wait_for_its_parents_save",)),
    (
        "fork after a read; the child reads",
        ("storage/test_fork.py::test_a_forked_child_gets_an_error_that_says_why",),
    ),
    # Garbage.
    ("killed saves to changing names", (f"{LEFTOVERS}::test_a_hundred_killed_saves",)),
    (
        "killed saves under changing host names",
        (
            f"{LEFTOVERS}::test_a_hundred_killed_saves",
            f"{LEFTOVERS}::test_a_save_removes_what_others_left_beside_it",
        ),
    ),
    ("gc", (f"{LEFTOVERS}::test_what_may_be_alive_elsewhere_goes_by_age",)),
    ("hundreds of saves and loads in one process", (f"{PROCESS}::test_no_leaks",)),
    # Hostile checkpoints.
    (
        "2^24 chunks that are not there: load",
        (f"{BOUNDS}::test_chunks_without_number_are_refused",),
    ),
    ("2^27 to 2^32 of them: verify", (f"{BOUNDS}::test_billions_of_chunks",)),
    ("2^32 of them: load", (f"{BOUNDS}::test_billions_of_chunks",)),
    (
        "shapes, names, roots, JSON, numbers that are absurd",
        (
            f"{BAD}::test_hostile_manifests",
            f"{BAD}::test_what_is_no_manifest",
            "core/manifest/test_codec.py::test_a_hostile_manifest_is_refused_or_harmless",
        ),
    ),
    (
        "devices, pipes, folders, loops, sparse files",
        (
            "storage/test_corruption.py::test_files_that_would_kill_a_careless_reader",
            "storage/test_corruption.py::test_linked_files",
            f"{HOSTILE}::test_special_files",
        ),
    ),
    (
        "very many pieces, very many values",
        (
            "core/manifest/test_codec.py::test_many_pieces_are_checked_quickly_and_in_little_memory",
            f"{HOSTILE}::test_very_many_values",
        ),
    ),
    ("an int of 8M digits", ("cli/test_elements.py::test_an_int_of_any_length_is_shown",)),
    (
        "escapes for terminals",
        (
            "cli/test_hostile_names.py::test_a_command_prints_no_character_that_drives_a_terminal",
            "cli/test_hostile_names.py::test_json_is_printable_and_has_the_names_as_they_are",
            "cli/test_hostile_names.py::test_an_error_of_every_class_is_harmless",
        ),
    ),
    ("rich markup", (f"{HOSTILE}::test_markup_is_text",)),
    (
        "pickles",
        (
            f"{PICKLES}::test_a_harmful_pickle_is_refused_and_nothing_is_run",
            f"{PICKLES}::test_an_absurd_pickle_is_refused",
        ),
    ),
    (
        "torch.save, safetensors and DCP of absurd sizes and paths",
        (
            f"{ARCHIVES}::test_what_is_no_archive_is_refused",
            f"{ARCHIVES}::test_an_expanded_tensor_is_refused",
            "formats/safetensors/test_header.py::test_damage_is_named",
            "formats/test_damage.py::test_any_damage",
        ),
    ),
    ("bombs of zlib and zstd", (f"{HOSTILE}::test_compressed_bombs",)),
    (
        "Orbax of absurd shapes",
        (
            "formats/orbax/test_source.py::test_arrays_that_cannot_be_trusted",
            f"{HOSTILE}::test_orbax_without_chunks",
        ),
    ),
    ("patterns that take exponential time", (f"{HOSTILE}::test_patterns_in_linear_time",)),
    ("mappings with absurd numbers", (f"{HOSTILE}::test_mappings_with_absurd_numbers",)),
    ("umask", (f"{HOSTILE}::test_the_umask_is_kept",)),
    (
        "odd names of leaves and paths",
        (
            "core/test_names.py::test_every_nasty_key_has_a_place_of_its_own",
            f"{PATHS}::test_what_is_no_path",
            f"{ODD}::test_long_names",
        ),
    ),
    ("names that differ in case", (f"{ODD}::test_names_that_differ_in_case",)),
)

ATTACKS = tuple(Attack(number, *row) for number, row in enumerate(_ROWS, 1))

ANSWERS, KEYS = "attacks/test_odd_answers.py", "attacks/test_odd_keys.py"
STRANGERS = "attacks/test_strangers.py"
CALLS = "attacks/test_failing_calls.py"
RELEASES = "attacks/test_two_releases.py"
PAGE = "attacks/test_page_server.py"
SLOW = "test_slow_disks.py"
CHANGED = "storage/test_changed_files.py"
DCP = "formats/dcp/test_source.py"

MORE: dict[str, tuple[str, ...]] = {
    "a wrong, half or missing token; half a message; a huge length; random bytes; words of life "
    "without end; a farewell of a stranger": (f"{STRANGERS}::test_a_stranger_is_hung_up_on",),
    "a thousand silent strangers": (f"{STRANGERS}::test_a_thousand_silent_strangers",),
    "a line between ranks that swallows, delays, cuts, carries single bytes": (
        f"{STRANGERS}::test_a_line_between_ranks",
    ),
    "another process at the socket of shared reads": (
        f"{STRANGERS}::test_a_stranger_at_the_exchange_of_a_host",
    ),
    "a network cut between ranks": (
        "attacks/test_ranks.py::test_the_network_is_cut_between_ranks",
        "attacks/test_networks.py::test_hosts_that_hear_nothing_of_each_other",
        "attacks/test_networks.py::test_a_bad_network_is_no_fault",
    ),
    "EIO, ESTALE, a quota, a full disk, a read-only one at each call that writes: packs, bases, "
    "managers, copies, conversions": (f"{CALLS}::test_a_call_that_writes_fails",),
    "EIO, ESTALE at each call that reads: loads, slices, diffs, views, lists of steps, gc": (
        f"{CALLS}::test_a_call_that_reads_fails",
    ),
    "a slow disk on one rank": (
        f"torch/{SLOW}::test_a_slow_rank_is_waited_for",
        f"torch/{SLOW}::test_six_seconds_of_work_within_a_timeout_of_two",
        f"jax/{SLOW}::test_a_slow_process_is_waited_for",
        f"jax/{SLOW}::test_six_seconds_of_work_within_a_timeout_of_two",
    ),
    "a disk that stops to answer": (
        f"torch/{SLOW}::test_a_disk_that_does_not_answer_any_more",
        f"jax/{SLOW}::test_a_disk_that_does_not_answer_any_more",
    ),
    "a later release at one path: bases, diffs, views, conversions, loads, gc": (
        f"{RELEASES}::test_what_a_later_release_wrote",
    ),
    "a later release in one run": (f"{RELEASES}::test_a_run_that_a_later_release_goes_on_with",),
    "claims of hosts whose clocks differ": (
        f"{RELEASES}::test_claims_of_hosts_whose_clocks_differ",
    ),
    "requests to the page's server that make no sense": (
        f"{PAGE}::test_a_request_that_makes_no_sense",
    ),
    "absurd questions to the page's server": (f"{PAGE}::test_a_question_that_is_absurd",),
    "many silent connections to the page's server": (f"{PAGE}::test_many_silent_connections",),
    "a pipe, a folder, 1 TiB, nothing in the place of a long file of digests or places, and of the "
    "manifest once it was read": (
        f"{CHANGED}::test_a_long_side_file",
        f"{CHANGED}::test_a_manifest_that_changes_beside_a_damaged_chunk",
    ),
    "archives of torch.save: long directories and pickles, names twice, names outside": (
        f"{ARCHIVES}::test_what_describes_an_archive_is_bounded_before_it_is_read",
        f"{ARCHIVES}::test_two_entries_of_one_name_are_refused",
        f"{ARCHIVES}::test_an_entry_outside_of_the_archives_folder_is_none_of_it",
    ),
    "DCP: lists of absent entries, entries that share bytes": (
        f"{DCP}::test_absent_entries_share_the_memory",
        f"{DCP}::test_entries_of_bytes_that_share_some",
    ),
    "what was refused stays in memory": (
        "storage/foreign/test_concurrency.py::test_what_a_refused_item_has_read_is_forgotten",
    ),
    "buckets: bodies cut, longer, shifted, swapped; wrong lengths and ranges; pages to sign in": (
        f"{ANSWERS}::test_odd_answers_to_reads",
    ),
    "buckets: 412, 409, 404, 500 of a write that was done or was not; no version, a weak one; "
    "Retry-After of an hour; wrong clocks": (f"{ANSWERS}::test_odd_answers_to_writes",),
    "buckets: deletions and writes that are said and not done": (
        f"{ANSWERS}::test_deletions_that_are_said_and_not_done",
        f"{ANSWERS}::test_writes_that_are_said_and_not_done",
    ),
    "buckets: redirects to itself, elsewhere, to a file": (f"{ANSWERS}::test_redirects",),
    "buckets: listings that lack keys, repeat them, make some up, have no end": (
        f"{ANSWERS}::test_odd_listings",
    ),
    "buckets: a manifest of before": (
        f"{ANSWERS}::test_reads_that_are_late_see_the_checkpoint_before",
    ),
    "buckets: requests that come 1.5 s late": (
        "storage/test_late_requests.py::test_a_manifest_that_arrives_amid_a_collection",
        "storage/test_late_requests.py::test_a_deletion_that_arrives_after_a_save_to_the_same_keys",
    ),
    "buckets: a key that is the path, markers of folders, odd characters, older versions": (
        f"{KEYS}::test_a_key_that_is_the_path_itself",
        f"{KEYS}::test_markers_of_folders",
        f"{KEYS}::test_a_marker_is_no_step_of_a_run",
        f"{KEYS}::test_keys_of_odd_characters_stay",
        f"{KEYS}::test_a_bucket_of_versions",
    ),
    "buckets: empty objects in place of others, keys that vanish between pages, packs that "
    "change": (
        f"{KEYS}::test_objects_in_place_of_others",
        f"{KEYS}::test_keys_that_vanish_between_pages",
        f"{KEYS}::test_steps_that_vanish_between_pages",
        f"{KEYS}::test_a_chunk_that_changes_between_two_ranges",
    ),
    "absurd shapes of nothing": (f"{ARCHIVES}::test_an_absurd_shape_of_nothing_is_refused",),
}
"""Attacks on what was built later, and their tests."""

PROMISES: dict[str, tuple[str, ...]] = {
    "Nothing half-written is ever readable.": (
        "api/test_crash.py::test_killed_at_any_moment",
        "api/test_crash.py::test_killed_before_each_operation",
        "conformance/crash/test_crash.py::test_every_kill_and_some_power_cuts",
    ),
    "A load survives an overwrite.": (
        "api/test_crash.py::test_savers_that_race",
        "engine/test_load.py::test_a_load_starts_again",
        "engine/test_load.py::test_all_ranks_alike",
        "engine/test_load.py::test_an_open_checkpoint_says_it_plainly",
    ),
    "Your own files are never deleted.": (
        "storage/commit/test_carry.py::test_an_overwrite_keeps_the_files_of_the_user",
        "conformance/crash/test_files_of_the_user.py::test_every_kill_and_some_power_cuts_keep_them",
    ),
    "Killed saves do not fill the disk.": (
        f"{LEFTOVERS}::test_a_save_removes_what_others_left_beside_it",
        f"{LEFTOVERS}::test_a_hundred_killed_saves",
        f"{LEFTOVERS}::test_what_may_be_alive_elsewhere_goes_by_age",
    ),
    "Nothing wrong is loaded silently.": (
        "storage/test_corruption.py::test_bytes_flipped_all_over",
        "storage/test_corruption.py::test_swapped_chunks",
        "storage/test_corruption.py::test_chunks_of_an_earlier_save",
        "storage/test_corruption.py::test_edited_zarr_json",
        "core/manifest/test_codec.py::test_every_flipped_bit_is_refused",
    ),
    "Nothing is executed.": (
        f"{PICKLES}::test_a_harmful_pickle_is_refused_and_nothing_is_run",
        "core/manifest/test_codec.py::test_an_absurd_leaf_is_refused_before_anything_is_allocated",
    ),
    "All ranks succeed or all fail": (
        RANKS,
        "engine/test_steps.py::test_one_cause_has_its_own_class_on_every_rank",
    ),
    "No rank's values are lost": (
        "engine/ranks/test_compare.py::test_small_leaves_that_differ_are_refused",
    ),
    "No rank waits in silence": (
        "torch/test_waiting.py::test_a_rank_that_waits_says_for_whom_and_goes_on_saying_so",
        "torch/test_waiting.py::test_a_timeout_names_the_silent_rank_on_all",
    ),
    "Little memory:": ("storage/test_budget.py::test_the_budget_is_kept",),
}
"""What docs/why/promises.md promises, by how each line begins, and the tests that hold it."""
