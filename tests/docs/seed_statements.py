"""The statements that the seeds' own tests make, and the tests here that are about them.

What makes no sense here is in docs/coming-from.md, under "Statements left out". ``test_seeds`` checks that both
together are all.
"""

from __future__ import annotations

from typing import NamedTuple

_CONSUMER = "stream_consumers/testing/consumer_contract.py::ConsumerContract::"
_FILE = "tests/stream_consumers/file/test_consumer.py::"
_STREAMER = "tests/stream_consumers/streamer/test_streamer.py::"
_GROUP = "tests/stream_consumers/test_in_process_groups.py::"
_FORMAT = "tests/stream_consumers/file/test_format.py::"
_SCANNER = "tests/stream_consumers/file/test_scanner.py::"
_SEARCH = "tests/stream_consumers/file/test_beacon_search.py::"
_PRODUCER = "tests/stream_consumers/file/test_producer.py::"
_REAL = "tests/stream_consumers/file/test_real_files.py::"
_REDIS = "tests/stream_consumers/redis/test_upstream.py::"
_KAFKA = "tests/stream_consumers/kafka/test_upstream.py::"
_STDIO = "tests/stream_consumers/stdio/test_consumer.py::"
_LINES = "tests/stream_consumers/stdio/test_lines.py::"
_LOOPBACK = "tests/stream_consumers/stdio/test_producer.py::"
_FAUST = "tests/stream_consumers/tracking/test_consumer.py::"
_WINDOW = "tests/stream_consumers/tracking/test_ack_window.py::"
_BROKER = "tests/stream_consumers/tracking/test_kafka.py::"
_COREDIS = "tests/stream_consumers/redis/test_coredis_consumers.py::"
_BACKEND = "tests/stream_consumers/subscription/test_backend_contract.py::"
_WORK = "tests/stream_consumers/subscription/test_subscription.py::"


class Statement(NamedTuple):
    """What a test of a seed says, in short, and the tests here."""

    says: str
    tests: tuple[str, ...]


def _of(says: str, *tests: str) -> Statement:
    return Statement(says, tests)


SEASTREAMER = {
    "F-consumer": _of(
        "earliest gets everything, one by one and as a stream; latest what comes; EOS ends both",
        _FILE + "test_earliest_and_latest_until_the_end_of_the_stream",
        _CONSUMER + "test_iteration_goes_on_behind_next_and_next_behind_iteration",
    ),
    "F-demux": _of("cats and dogs each get their own, in order", _STREAMER + "test_cats_and_dogs"),
    "F-group": _of(
        "members share by sequence, in the order of joining", _GROUP + "test_group_by_sequence_in_the_order_of_joining"
    ),
    "F-seek": _of(
        "rewind to the beginning and to sequences, without a group and in one",
        _FILE + "test_rewind",
        _GROUP + "test_seek_in_a_group_leaves_it",
    ),
    "F-producer": _of(
        "two producers in the order of send, one is closed, all end, numbering goes on over the EOS",
        _STREAMER + "test_two_producers_write_in_the_order_of_send",
    ),
    "F-streamer": _of(
        "a missing file is refused, created if it must be new, created if it is missing",
        _STREAMER + "test_a_file_that_is_missing",
        _STREAMER + "test_a_file_that_is_created_if_it_is_missing",
    ),
    "F-sample": _of("a file of the real producer, to its end", _REAL + "test_messages_are_what_the_real_one_was_given"),
    "F-surveyor": _of("the binary search over beacons that may not know", _SEARCH + "test_surveyor_vectors"),
    "F-loopback::loopback/file": _of(
        "what is written is read; header, message, beacon and checksum; a name that is too long; while the file grows",
        _FORMAT + "test_header_round_trip",
        _FORMAT + "test_beacons_round_trip",
        _FORMAT + "test_checksum_vectors",
        _FORMAT + "test_frames_that_do_not_fit",
        _SCANNER + "test_a_growing_file_yields_the_same_as_a_whole_one",
        "stream_consumers/testing/consumer_contract.py::ProducerContract::"
        "test_flushed_messages_can_be_read_while_the_producer_goes_on",
    ),
    "F-loopback::beacon": _of(
        "a beacon behind the header; reads skip beacons; rewind skips what is left of a message; past the end",
        _FORMAT + "test_empty_beacon_behind_the_header_when_the_interval_is_128",
        _SCANNER + "test_reads_skip_beacons_that_follow_the_header",
        _SCANNER + "test_rewind_to_beacons",
        _SCANNER + "test_skip_to_a_frame_that_is_not_whole",
    ),
    "F-loopback::sink": _of(
        "three sessions are one stream, without an EOS in between",
        _SCANNER + "test_sink_sessions",
        _PRODUCER + "test_an_end_of_stream_is_removed_by_appending",
    ),
    "F-loopback::rewind": _of(
        "running checksums; a long message makes a rewind slip to the next; the end, then new messages",
        _FORMAT + "test_running_checksum_of_a_real_file",
        _SCANNER + "test_rewind_to_beacons",
        _CONSUMER + "test_rewind_to_the_end",
    ),
    "F-loopback::source": _of(
        "seek by sequence and by time, with and without beacons, and out of bounds",
        _FILE + "test_seek_in_a_file_without_and_with_beacons",
    ),
    "F-reader": _of("a file of 100 messages with all its beacons", _REAL + "test_every_beacon_is_read"),
    "R-consumer-group": _of(
        "a stream that is not there is an error, or is made",
        _REDIS + "test_consumer_group_does_not_make_a_stream_unless_told",
        _REDIS + "test_consumer_group_makes_the_stream",
    ),
    "R-load-balance": _of("two members share everything, each gets something", _REDIS + "test_load_balance"),
    "R-failover": _of("what a member left is claimed; it comes back and gets new ones", _REDIS + "test_failover"),
    "R-realtime": _of("latest and earliest, one stream and two, server and cluster", _REDIS + "test_realtime"),
    "R-realtime-multi a": _of(
        "a quiet stream is not starved", _REDIS + "test_realtime_multi_a_b_quiet_streams_are_not_starved"
    ),
    "R-realtime-multi b": _of("nor are three", _REDIS + "test_realtime_multi_a_b_quiet_streams_are_not_starved"),
    "R-realtime-multi c": _of(
        "latest skips the history of each", _REDIS + "test_realtime_multi_c_latest_skips_the_history_of_each"
    ),
    "R-realtime-multi d": _of(
        "a quiet stream with a history neither replays nor loses",
        _REDIS + "test_realtime_multi_d_f_a_quiet_stream_with_history_neither_replays_nor_loses",
    ),
    "R-realtime-multi e": _of(
        "the first entries of absent streams",
        _REDIS + "test_realtime_multi_e_the_first_entries_of_streams_that_were_not_there",
    ),
    "R-realtime-multi f": _of(
        "over five rounds", _REDIS + "test_realtime_multi_d_f_a_quiet_stream_with_history_neither_replays_nor_loses"
    ),
    "R-realtime-multi g": _of(
        "earliest gets history and new ones", _REDIS + "test_realtime_multi_g_earliest_gets_history_and_new"
    ),
    "R-realtime-multi h": _of("a key of the wrong type", _REDIS + "test_realtime_multi_h_a_key_of_the_wrong_type"),
    "R-resumable-1": _of("immediate and delayed go on behind what was read", _REDIS + "test_resumable_1"),
    "R-resumable-2": _of("rolling and disabled go on at what was not committed", _REDIS + "test_resumable_2"),
    "R-seek-rewind": _of("rewind and seek in batches of 1, 5 and 25, in a group too", _REDIS + "test_seek_rewind"),
    "R-sharding": _of(
        "round robin over three shards, all of them are read",
        _REDIS + "test_sharding",
        _STREAMER + "test_a_sharder_spreads_the_messages",
    ),
    "R-units": _of("what is an id, and what is not", _REDIS + "test_units_ids", _REDIS + "test_units_not_ids"),
    "Kafka": _of(
        "real time, rewind, resumable, commit, seek; URLs of clusters; SASL",
        _KAFKA + "test_consumer",
        "tests/stream_consumers/test_urls.py::test_vectors",
        "tests/spark_jobs/batches/test_kafka_access.py::test_a_password_works_from_end_to_end_and_dagster_never_hears_it",
    ),
    "Stdio, group": _of(
        "one member gets everything, two get every other",
        _STDIO + "test_a_group_shares_by_sequence_in_the_order_of_joining",
        _LOOPBACK + "test_loopback_in_a_group",
    ),
    "Stdio, loopback": _of(
        "off, nothing is echoed; disconnected, nothing goes; connected again, 0 to 4 come back",
        _STREAMER + "test_lines_are_looped_back_after_connecting_again",
        _LOOPBACK + "test_loopback_gives_a_process_its_own_messages",
    ),
    "Stdio, parser": _of(
        "the lines that are accepted, and those that are not",
        _LINES + "test_lines_that_seastreamer_reads",
        _LINES + "test_a_line_without_a_valid_header_is_a_payload",
    ),
}

FAUST = {
    "Faust 2": _of(
        "stop requested while waiting", _FAUST + "test_getmany_stop_requested_during_the_wait_yields_nothing"
    ),
    "Faust 3": _of(
        "flow inactive when the fetch returns",
        _FAUST + "test_getmany_flow_inactive_when_the_fetch_returns_yields_nothing_and_keeps_the_message",
    ),
    "Faust 4": _of(
        "flow inactive after the first",
        _FAUST + "test_getmany_flow_becomes_inactive_after_the_first_yields_exactly_one",
    ),
    "Faust 5": _of("active shards in turn", _FAUST + "test_getmany_of_active_shards_in_turn"),
    "Faust 8": _of("waits until the flow is resumed", _FAUST + "test_flow_inactive_waits_until_it_is_resumed"),
    "Faust 9": _of("no active shard", _FAUST + "test_no_active_shard_yields_nothing"),
    "Faust 12": _of("perform_seek", _FAUST + "test_perform_seek_goes_to_what_is_committed_and_0_is_a_position"),
    "Faust 13": _of("seek of one shard", _FAUST + "test_seek_one_shard"),
    "Faust 15": _of("stop_flow and resume_flow", _FAUST + "test_flow_inactive_waits_until_it_is_resumed"),
    "Faust 16": _of(
        "pause and resume",
        _FAUST + "test_pause_keeps_what_was_fetched_and_resume_hands_it_out_in_order",
        _BROKER + "test_pause_and_resume_lose_nothing",
    ),
    "Faust 17": _of("an unknown shard", _FAUST + "test_read_and_committed_of_an_unknown_shard_are_none"),
    "Faust 19": _of(
        "revoked: one call, and nothing is active",
        _FAUST + "test_revoked_calls_back_once_commits_and_then_forgets",
        _BROKER + "test_shards_are_committed_before_they_are_released",
    ),
    "Faust 20": _of(
        "assigned: one call",
        _FAUST + "test_assigned_calls_back_and_begins_at_what_is_committed",
        _BROKER + "test_shards_are_committed_before_they_are_released",
    ),
    "Faust 21": _of("track_message", _FAUST + "test_track_message_is_in_unacked_until_every_reader_is_done"),
    "Faust 22": _of(
        "ack twice, below what is committed, of nothing",
        _FAUST + "test_ack_twice_or_below_committed_or_of_a_stranger_counts_once",
        _WINDOW + "test_ack_twice_below_committed_or_of_what_was_never_delivered_counts_once",
    ),
    "Faust 23": _of(
        "wait_empty",
        _FAUST + "test_wait_empty_commits_until_everything_is_finished",
        _FAUST + "test_wait_empty_has_a_deadline_and_commits_what_it_may",
    ),
    "Faust 24": _of("on_stop and stream_wait_empty", _FAUST + "test_on_stop_honours_stream_wait_empty"),
    "Faust 25": _of(
        "force_commit of some",
        _FAUST + "test_the_filter_takes_shards_and_streams",
        _FAUST + "test_commit_while_another_runs_waits_and_commits_nothing",
    ),
    "Faust 26": _of(
        "what cannot be published is not committed",
        _BROKER + "test_nothing_is_seen_of_an_aborted_one_and_its_messages_come_again",
    ),
    "Faust 27": _of("nothing committable", _FAUST + "test_nothing_committable_is_no_call"),
    "Faust 28": _of("two shards with holes", _FAUST + "test_commit_what_is_committable_of_two_shards"),
    "Faust 30": _of(
        "only what is owned; a refused commit; in a transaction",
        _BROKER + "test_what_was_lost_is_not_committed_over_the_new_owner",
        _FAUST + "test_a_failed_commit_advances_nothing_and_keeps_the_error",
        _BROKER + "test_messages_and_positions_land_together",
    ),
    "Faust 31": _of("one commit at a time", _FAUST + "test_commit_while_another_runs_waits_and_commits_nothing"),
    "Faust 32": _of("shards or streams", _FAUST + "test_the_filter_takes_shards_and_streams"),
    "Faust 33": _of("should_commit", _WINDOW + "test_should_commit"),
    "Faust 34": _of("new_offset", _WINDOW + "test_new_offset"),
    "Faust 35": _of("new_offset with gaps", _WINDOW + "test_new_offset_with_gaps"),
    "Faust 36": _of("add_gap", _WINDOW + "test_add_gap_below_what_is_committed_changes_nothing"),
    "Faust 37": _of("the commit handler", _FAUST + "test_the_commit_handler_commits_again_and_again"),
    "Faust 38": _of("on_task_error", _FAUST + "test_on_task_error_commits_what_is_finished_and_not_the_message"),
    "Faust 39": _of(
        "a fetcher that stops",
        _FAUST + "test_close_ends_threads_that_wait",
        _FAUST + "test_leaving_after_an_error_does_not_wait_for_what_nobody_finishes",
    ),
    "Faust 40": _of(
        "transactions: positions together, an empty commit, fenced",
        _BROKER + "test_messages_and_positions_land_together",
        _BROKER + "test_an_empty_commit_is_fine_and_one_that_was_not_begun_is_not",
        _BROKER + "test_who_is_fenced_out_commits_nothing",
    ),
    "Faust 41": _of(
        "commits while the group changes; 0 is a position",
        _BROKER + "test_commits_in_the_background_while_the_group_changes",
        _BROKER + "test_what_was_lost_is_not_committed_over_the_new_owner",
        _FAUST + "test_perform_seek_goes_to_what_is_committed_and_0_is_a_position",
    ),
    "Faust 42": _of(
        "no flow, a closed consumer, options out of range",
        _FAUST + "test_flow_inactive_waits_until_it_is_resumed",
        _FAUST + "test_close_ends_threads_that_wait",
        _FAUST + "test_options_out_of_range",
    ),
    "Faust 43": _of(
        "what cannot be decoded is told and passed, not tried again",
        "tests/stream_consumers/redis/test_group_consumer.py::test_entries_that_are_no_messages_do_not_stop_the_consumer",
        "tests/spark_jobs/batches/test_kafka_traps.py::test_k01_a_first_message_that_fails_commits_nothing_before_it_is_a_dead_letter",
    ),
}

COREDIS = {
    "coredis 1": _of("two streams, complete and in order", _COREDIS + "test_01_two_streams_complete_and_in_order"),
    "coredis 2": _of("in a group that is there", _COREDIS + "test_02_the_same_in_a_group_that_is_there"),
    "coredis 3": _of("no entries", _COREDIS + "test_03_without_entries_nothing_comes"),
    "coredis 4": _of("from the latest on", _COREDIS + "test_04_starts_behind_what_is_there"),
    "coredis 5": _of("from an identifier on", _COREDIS + "test_05_one_stream_from_the_beginning"),
    "coredis 6": _of("entered again", _COREDIS + "test_06_entering_again_replays_from_the_identifiers"),
    "coredis 7": _of("a group entered again", _COREDIS + "test_07_a_group_goes_on_and_keeps_pending_what_was_buffered"),
    "coredis 8": _of("no group", _COREDIS + "test_08_a_missing_group_names_the_streams_that_lack_it"),
    "coredis 9": _of("add_stream", _COREDIS + "test_09_a_stream_that_is_added"),
    "coredis 10": _of("add_stream in a group", _COREDIS + "test_10_a_stream_that_is_added_to_a_group"),
    "coredis 11": _of("a group that is made", _COREDIS + "test_11_a_group_and_stream_that_are_made"),
    "coredis 12": _of("two members", _COREDIS + "test_12_two_members_share_everything"),
    "coredis 13": _of("start_from_backlog", _COREDIS + "test_13_the_backlog_comes_first"),
    "coredis 14": _of("buffered", _COREDIS + "test_14_buffered"),
    "coredis 15": _of("a timeout", _COREDIS + "test_15_waiting_gets_what_is_added_meanwhile"),
    "coredis 16": _of("drains, then ends", _COREDIS + "test_16_iterating_without_waiting_drains_everything_and_ends"),
}

STREAM_BACKEND = {
    "StreamBackend 1": _of("success drains", _WORK + "test_s1_success_drains_pending_and_all_fields_arrive"),
    "StreamBackend 2": _of("manual ack drains", _WORK + "test_s2_manual_ack_drains"),
    "StreamBackend 3": _of("one retry", _WORK + "test_s3_a_retry_is_the_same_entry_again_and_no_copy"),
    "StreamBackend 4": _of(
        "taken over when idle", _WORK + "test_s4_what_a_closed_member_left_is_taken_over_when_it_is_idle"
    ),
    "StreamBackend 5": _of("nack", _WORK + "test_s5_a_nack_is_a_dead_letter_at_once"),
    "StreamBackend 6": _of(
        "max_retry 1", _WORK + "test_s6_max_retries_1_means_two_calls_and_a_dead_letter_with_the_bytes"
    ),
    "StreamBackend 7": _of(
        "manual, and the handler fails", _WORK + "test_s7_manual_and_a_handler_that_raises_publishes_nothing"
    ),
    "StreamBackend 8": _of("no name", _WORK + "test_s8_a_consumer_without_a_name_gets_one_of_its_own"),
    "StreamBackend 9": _of("dropped", _WORK + "test_s9_s23_a_dropped_subscription_says_so_and_delivers_nothing_more"),
    "StreamBackend 10": _of("one in flight", _WORK + "test_s10_the_second_message_waits_for_the_first"),
    "StreamBackend 11": _of(
        "one budget when taken over", _WORK + "test_s11_messages_that_were_taken_over_use_the_same_budget"
    ),
    "StreamBackend 12": _of(
        "start id 0", _BACKEND + "test_s12_a_group_that_starts_at_0_gets_what_was_published_before"
    ),
    "StreamBackend 13": _of(
        "publish_batch", _BACKEND + "test_s13_publish_batch_has_one_result_per_input_and_a_bad_one_fails_alone"
    ),
    "StreamBackend 14": _of("an empty uid", _BACKEND + "test_s14_an_empty_uid_is_allowed"),
    "StreamBackend 15": _of("ack fails", _WORK + "test_s15_a_failed_acknowledgement_is_told_once_and_raised_at_close"),
    "StreamBackend 16": _of("acks coalesce", _WORK + "test_s16_acknowledgements_are_coalesced"),
    "StreamBackend 18": _of("oversize", _BACKEND + "test_s18_an_oversize_message_is_refused"),
    "StreamBackend 19": _of(
        "no dead letters to go to", _WORK + "test_s19_without_a_dead_letter_stream_there_is_no_subscription"
    ),
    "StreamBackend 20": _of(
        "is_running", _WORK + "test_s20_is_running_until_it_is_closed_and_closing_again_does_nothing"
    ),
    "StreamBackend 21": _of(
        "malformed", _WORK + "test_s21_a_malformed_entry_is_a_dead_letter_with_its_bytes_and_the_next_ones_come"
    ),
    "StreamBackend 22": _of("on receive", _WORK + "test_s22_on_receive_acknowledges_before_the_handler"),
    "StreamBackend 23": _of(
        "dropped, the observer", _WORK + "test_s9_s23_a_dropped_subscription_says_so_and_delivers_nothing_more"
    ),
    "StreamBackend 24": _of(
        "a handler that panics", _WORK + "test_s24_a_handler_that_raises_anything_is_told_and_the_loop_goes_on"
    ),
    "StreamBackend 25": _of("forget_consumer once", _WORK + "test_s25_close_and_abort_forget_the_consumer_once"),
    "StreamBackend 26": _of("two groups", _BACKEND + "test_s26_two_groups_each_get_every_message"),
    "StreamBackend 27": _of(
        "left undecided", _WORK + "test_s27_a_message_left_undecided_frees_its_place_and_comes_again"
    ),
    "StreamBackend 30": _of(
        "what Redis gives: malformed, cursors, oversize",
        _BACKEND + "test_s30_an_entry_that_cannot_be_decoded_poisons_neither_read_nor_reclaim",
        _BACKEND + "test_no_more_is_claimed_than_asked_for_and_the_next_search_goes_on",
        _BACKEND + "test_an_oversize_entry_is_told_with_size_and_place_and_not_kept",
    ),
}

STATEMENTS = {**SEASTREAMER, **FAUST, **COREDIS, **STREAM_BACKEND}
EVERY_STATEMENT = (
    *SEASTREAMER,
    *(f"Faust {number}" for number in range(1, 44)),
    *(f"coredis {number}" for number in range(1, 17)),
    *(f"StreamBackend {number}" for number in range(1, 31)),
)
