"""Sixty-five ways in which a training run may fail, what happens, and the test that shows it:

    python -m experiments.reliability [--page=docs/reliability.md]

writes the page. A row has tests or a reason why it has none. `tests/experiments/test_reliability.py` checks that every
test exists.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from absl import flags

from jaxmarl_llm.cli import config_flags

HOLDS, PART, NOT = "holds", "in part", "not handled"


class Row(NamedTuple):
    """One scenario.

    number: from 1. scenario: what goes wrong. verdict: `HOLDS`, `PART` or `NOT`. happens: what the code does. tests:
    node ids below tests/, without parameters. reason: why there is no test; empty where there are tests.
    """

    number: int
    scenario: str
    verdict: str
    happens: str
    tests: tuple[str, ...] = ()
    reason: str = ""


CHECKPOINT, LOCK, LOOP = "storage/test_checkpoint.py", "storage/test_lock.py", "runs/test_loop.py"
PROCESSES, SIGNALS, HEALTH = "distributed/test_processes.py", "distributed/test_signals.py", "runs/test_health.py"
SANDBOX, BUDGET, RULES = "sandbox/test_sandbox.py", "sandbox/test_budget.py", "envs/test_answer_rules.py"
ADVANTAGES, LEARNER, LOSSES = "credit/test_advantages.py", "training/test_learner.py", "training/test_losses.py"
GENERATE, HOST, ARRAY = "generation/test_generate.py", "rollout/test_host.py", "rollout/test_array.py"
TOKENIZER, POOL, MEMORY = "models/test_tokenizer.py", "rollout/test_env_pool.py", "agents/test_memory.py"
ASSISTANT, SPLITS, METRICS = "envs/test_assistant.py", "envs/test_splits.py", "telemetry/test_metrics.py"
WEIGHTS, PARITY, CODE = "models/test_hf_weights.py", "models/test_parity.py", "data/test_code_tasks.py"
KILLS = "experiments/test_kills.py::test_killed_runs_are_the_run_that_was_not"

PARTS: dict[str, tuple[Row, ...]] = {
    "Checkpoints": (
        Row(
            1,
            "A run is killed with signal 9 at any time, also during a save.",
            HOLDS,
            "No step whose save was complete is lost. The resumed run equals the unbroken one to the byte. "
            "Half-written saves are removed.",
            (f"{CHECKPOINT}::test_kill_during_saves_loses_no_acknowledged_step", KILLS),
        ),
        Row(
            2,
            "A run is killed in a rollout, a reward, an update, a memory write, an evaluation or an export.",
            PART,
            "The resumed run equals the unbroken one, and each step is once in the metrics. The tests make two such "
            "kills; `python -m experiments.kills` makes 40. A new export removes what a killed one left; no test "
            "kills one.",
            (KILLS, f"{WEIGHTS}::test_overwriting_is_asked_for_and_cleans_up_after_a_killed_export"),
        ),
        Row(
            3,
            "The disk is full while a checkpoint is written.",
            PART,
            "The error names the file. The step before stays, and a later save works. The message does not say how "
            "much room is missing. The test limits the size of files, and fills no disk.",
            (f"{CHECKPOINT}::test_a_save_that_the_disk_refuses_is_an_error_and_costs_no_step",),
        ),
        Row(
            4,
            "One bit of the newest checkpoint is flipped.",
            HOLDS,
            "Every changed value is noticed by its SHA-256. The step moves to corrupt/, and the step before is "
            "restored. A flip in a file without values changes nothing.",
            (f"{CHECKPOINT}::test_no_flipped_bit_loads_silently", f"{CHECKPOINT}::test_damage_that_is_still_json"),
        ),
        Row(
            5,
            "Files of the newest checkpoint are cut, deleted or zero, or its folder is empty.",
            HOLDS,
            "As for a flipped bit. Where no step is intact, the run ends with a list of what was tried. It never "
            "starts anew in a used workdir.",
            (
                f"{CHECKPOINT}::test_truncated_deleted_or_zeroed_files",
                f"{CHECKPOINT}::test_missing_directories",
                f"{CHECKPOINT}::test_empty_directories",
                f"{CHECKPOINT}::test_no_good_step_is_an_error_that_names_what_was_tried",
                f"{LOOP}::test_a_run_whose_metas_are_damaged_does_not_start_anew",
            ),
        ),
        Row(
            6,
            "A save in the background fails once.",
            HOLDS,
            "Waiting for the save raises its error. The failed step is never listed, and a later step is saved.",
            (f"{CHECKPOINT}::test_a_save_that_the_disk_refuses_is_an_error_and_costs_no_step",),
        ),
        Row(
            7,
            "One checkpoint is kept, and the next save fails. A run is resumed many times.",
            HOLDS,
            "The old step is deleted after the new one is complete. Older steps than `run.keep` allows are deleted "
            "at every save.",
            (
                f"{CHECKPOINT}::test_a_save_that_the_disk_refuses_is_an_error_and_costs_no_step",
                f"{CHECKPOINT}::test_keeps_the_last_steps",
            ),
        ),
        Row(
            8,
            "A run is resumed on another number of devices.",
            PART,
            "The restored values are the same bytes. The next step agrees but for rounding. No metric notes the "
            "change.",
            ("distributed/test_sharded_runs.py::test_a_checkpoint_goes_on_on_another_mesh",),
        ),
        Row(
            9,
            "A run is resumed with another configuration.",
            HOLDS,
            "It is refused with the key, the old value and the new one, unless `--allow_config_change` names the "
            "key. No checkpoint is moved.",
            (
                f"{LOOP}::test_a_changed_configuration_is_refused_by_key",
                f"{LOOP}::test_another_optimizer_is_refused_and_costs_no_checkpoint",
            ),
        ),
        Row(
            10,
            "A later version reads the checkpoint of a release.",
            HOLDS,
            "Every array is what the release wrote, and training goes on. A version without such a checkpoint fails "
            "the tests.",
            (
                "storage/test_golden.py::test_this_version_has_a_checkpoint",
                "storage/test_golden.py::test_every_array_is_what_the_version_wrote",
                "storage/test_golden.py::test_a_run_goes_on_from_it",
            ),
        ),
        Row(
            11,
            "Two runs are started in one workdir.",
            HOLDS,
            "The second one ends at once and names the holder of run.lock. The lock of a process that has ended is "
            "taken.",
            (
                f"{LOCK}::test_a_living_process_is_refused_and_a_dead_one_followed",
                f"{LOCK}::test_many_at_once_are_one",
                "runs/test_files.py::test_a_workdir_that_another_run_holds_is_refused_and_left_as_it_is",
            ),
        ),
        Row(
            12,
            "The workdir cannot be written, leads to itself, or has an unusual name.",
            PART,
            "One line names the workdir before anything is compiled. Spaces and Unicode work. No test has a quota of "
            "0 bytes.",
            (
                "cli/test_cli.py::test_error_is_one_line_and_exit_code_2",
                f"{LOCK}::test_a_workdir_that_cannot_be_written_is_one_line",
                f"{LOCK}::test_a_workdir_that_leads_to_itself_is_one_line",
                f"{CHECKPOINT}::test_a_workdir_may_have_any_name",
            ),
        ),
    ),
    "Many processes": (
        Row(
            13,
            "SIGTERM comes in any phase.",
            PART,
            "The step in progress is completed and saved, and the exit code 75 asks for another run. Also a long "
            "compilation hears it. The tests send it in one phase of training, not in thirty moments.",
            (
                f"{PROCESSES}::test_sigterm_to_one_process_saves_and_asks_to_be_run_again",
                f"{SIGNALS}::test_signals_are_answered_while_the_main_thread_is_busy",
            ),
        ),
        Row(
            14,
            "One of several processes is killed.",
            HOLDS,
            "All others end with exit code 75 and name it. The resumed run equals the unbroken one to the byte.",
            (
                f"{PROCESSES}::test_when_one_is_killed_the_others_end_and_name_it",
                f"{PROCESSES}::test_a_run_of_two_that_is_stopped_and_loses_a_process_is_the_run_that_was_not",
            ),
        ),
        Row(
            15,
            "One host is not started.",
            HOLDS,
            "After `--init_timeout` all others end and name the missing processes.",
            (f"{PROCESSES}::test_one_that_never_starts_is_named_by_all",),
        ),
        Row(
            16,
            "One process is slower, or its completions are empty.",
            PART,
            "Every process has the whole batch, so shapes agree. A stage beyond its deadline ends all processes. No "
            "test delays one process and lets it go on.",
            (
                f"{PROCESSES}::test_host_environments_run_where_their_tasks_are",
                f"{PROCESSES}::test_environment_calls_are_divided_by_task_and_come_back_in_order",
                f"{PROCESSES}::test_when_one_hangs_all_say_where_they_wait_and_end",
            ),
        ),
        Row(
            17,
            "The clock jumps, or a network folder gives stale handles.",
            PART,
            "An error in reading ends the run and moves no checkpoint. Nothing is tried again. No test lets the "
            "clock jump.",
            (f"{CHECKPOINT}::test_what_says_nothing_about_the_files_moves_nothing",),
        ),
    ),
    "Rewards and the sandbox": (
        Row(
            18,
            "Generated programs attack their judge and the host.",
            HOLDS,
            "No verdict is forged, and nothing outside changes, in both tiers. The judge lives, and no process "
            "outlives it.",
            (
                f"{SANDBOX}::test_hostile_programs",
                f"{SANDBOX}::test_hostile_programs_in_the_second_tier",
                "sandbox/test_jails.py::test_no_program_outlives_its_judge",
                "sandbox/test_jails.py::test_every_call_of_the_kernel_that_is_not_on_the_list_is_refused",
            ),
        ),
        Row(
            19,
            "A thousand programs are judged by eight workers, some of them hostile.",
            PART,
            "Each program has a budget of CPU and wall time, decoding included, and costs no other its verdict. No "
            "test judges a thousand, or measures the memory of the judge.",
            (
                f"{BUDGET}::test_decoding_spends_the_budget",
                f"{BUDGET}::test_sleeping_within_the_limit_of_each_call_is_a_timeout",
                f"{POOL}::test_a_hanging_call_times_out_and_the_others_are_answered",
            ),
        ),
        Row(
            20,
            "Correct solutions are judged on a busy machine.",
            PART,
            "All reference solutions of HumanEval and MBPP pass, where the full data are there. Waiting for a "
            "processor is not the program's time. No test repeats them under load.",
            (
                f"{SANDBOX}::test_humaneval",
                f"{SANDBOX}::test_mbpp",
                f"{SANDBOX}::test_waiting_for_a_processor_is_not_the_programs_time",
            ),
        ),
        Row(
            21,
            "The machine has no tier of the sandbox.",
            HOLDS,
            "Scoring is refused in one line that says what to install. Nothing is executed outside a jail.",
            (
                f"{SANDBOX}::test_probe_says_what_is_missing_and_never_falls_back",
                "envs/test_coding.py::test_no_sandbox_no_rollout",
            ),
        ),
        Row(
            22,
            "A reward raises, hangs, ends its process, or is no finite number.",
            HOLDS,
            "Its joint action is invalid, never 0, and enters no statistic. A share above `run.max_invalid` ends the "
            "run. A batch without a valid reward changes no parameter.",
            (
                f"{HOST}::test_what_cannot_be_computed_is_invalid_and_never_zero",
                f"{HEALTH}::test_some_rewards_fail_and_the_run_goes_on_and_says_so",
                f"{HEALTH}::test_rewards_that_always_fail_end_the_run_before_anything_is_compiled",
                f"{HEALTH}::test_a_share_above_max_invalid_ends_the_run_with_the_reason",
                f"{LOOP}::test_all_invalid_rewards_change_no_parameter",
            ),
        ),
        Row(
            23,
            "Mathematics is verified in a thread, or the text is hostile.",
            HOLDS,
            "A thread gives the verdicts of the main thread. Hostile texts are wrong within 2 s.",
            (
                f"{RULES}::test_golden_answers_are_right_in_a_thread_too",
                f"{RULES}::test_same_verdicts_in_a_thread",
                f"{RULES}::test_hostile_mathematics_is_wrong_and_quick",
            ),
        ),
        Row(
            24,
            "The right number is written in many ways.",
            HOLDS,
            "A table of texts has the expected verdicts.",
            (f"{RULES}::test_gsm8k_formats", f"{RULES}::test_thousands_and_whole_solutions"),
        ),
        Row(
            25,
            "A policy finds a known exploit of a reward.",
            HOLDS,
            "With the strict rewards, no listed exploit is worth more than an honest answer. The papers' own rewards "
            "fall for some of them.",
            (
                "envs/test_coding_rewards.py::test_no_hack_beats_an_honest_answer",
                "envs/test_writing_rewards.py::test_hacks_do_not_pay_in_strict_mode",
                "envs/test_red_team.py::test_writing",
                "envs/test_red_team.py::test_assistant",
                "envs/test_red_team.py::test_function_calls",
                "envs/test_red_team.py::test_coding",
            ),
        ),
        Row(
            26,
            "One component of the reward dominates while the success rate stays the same.",
            HOLDS,
            "One line says so when a component brings more than 80 % of the variance of the reward for 50 steps. Each "
            "component's share is a metric, `reward_variance/<component>`.",
            (
                "runs/test_alarms.py::test_a_dominant_component_alarms_while_success_is_flat",
                "runs/test_alarms.py::test_variance_shares_are_those_of_enumeration",
            ),
        ),
    ),
    "Numbers and learning": (
        Row(
            27,
            "All rewards of a group are equal.",
            HOLDS,
            "Advantages and gradient are exactly 0, and parameters stay the same bytes.",
            (
                f"{ADVANTAGES}::test_equal_members_get_exactly_zero",
                f"{LOSSES}::test_zero_advantages_give_exactly_no_gradient",
                f"{LOOP}::test_grpo_learns_nothing_from_equal_rewards_and_runs",
            ),
        ),
        Row(
            28,
            "Rewards differ by very little, by very much, or one member is alone or valid.",
            HOLDS,
            "Advantages are finite and bounded. One odd reward among eight has a moderate advantage also with "
            "leave-one-out.",
            (
                f"{ADVANTAGES}::test_finite_whatever_the_values",
                f"{ADVANTAGES}::test_loo_of_one_odd_reward",
                f"{ADVANTAGES}::test_large_offset_keeps_the_small_difference",
                f"{ADVANTAGES}::test_singletons",
            ),
        ),
        Row(
            29,
            "A loss or a gradient is NaN or infinite.",
            PART,
            "The step is skipped, and the optimizer stays the same bytes. The first bad quantity is named. Too many "
            "such steps end the run. NaN is never saved; an infinite parameter is. The batch is not written to a "
            "file.",
            (
                f"{LEARNER}::test_a_step_that_is_not_finite_is_skipped",
                f"{LEARNER}::test_a_skipped_step_names_the_first_quantity_that_is_not_finite",
                f"{LOOP}::test_a_run_stops_after_bad_steps_and_keeps_its_checkpoint",
                f"{CHECKPOINT}::test_nan_is_refused_and_the_step_before_stays",
            ),
        ),
        Row(
            30,
            "A batch is split into other micro-batches.",
            PART,
            "Gradients agree to 1e-5, relative to their norm. No test follows 50 steps.",
            (
                f"{LEARNER}::test_any_split_into_micro_batches_gives_the_same_gradient",
                f"{LOSSES}::test_micro_batches_add_up",
            ),
        ),
        Row(
            31,
            "A loss averages over the wrong tokens or sequences.",
            HOLDS,
            "Every loss and every average equals a slow numpy version, to 1e-4 in float32.",
            (
                f"{LOSSES}::test_policy_loss_equals_the_loop_and_its_differences",
                f"{LOSSES}::test_aggregation_weights_equal_the_loop",
                f"{LOSSES}::test_magrpo_loss_by_hand",
                f"{ADVANTAGES}::test_variances_of_joyagents",
            ),
        ),
        Row(
            32,
            "Sampler and learner disagree on log-probabilities.",
            HOLDS,
            "They agree to 1e-5 in float32, also with top-k, top-p and temperature. The ratio of the first step is "
            "1. A run ends above `run.max_logprob_gap`.",
            (
                f"{ARRAY}::test_recorded_logprobs_are_the_learners",
                f"{LEARNER}::test_ratio_is_exactly_one_at_the_first_inner_step",
            ),
        ),
        Row(
            33,
            "A sample has other samples or more padding beside it.",
            HOLDS,
            "The tokens are the same, and log-probabilities agree to 1e-5. With `team.batch_invariant` they are the "
            "same bits.",
            (
                f"{GENERATE}::test_one_sample_alone",
                f"{GENERATE}::test_a_larger_bucket_with_longer_padding",
                "models/test_batch_invariant.py::test_a_sample_alone",
                "models/test_batch_invariant.py::test_buckets",
            ),
        ),
        Row(
            34,
            "A run is repeated with the same seed, and calls of the environment end in another order.",
            HOLDS,
            "Rollouts, metrics and parameters are the same. Results are taken in the order of the calls.",
            (
                KILLS,
                f"{HOST}::test_equal_keys_play_the_same_and_others_do_not",
                f"{POOL}::test_results_in_order",
            ),
        ),
        Row(
            35,
            "A fault makes learning impossible without an error.",
            PART,
            "A team reaches the known best of a small game, with one seed. [Systems](systems.md) has five seeds and "
            "more. No test reverses the reward or shuffles the groups.",
            ("training/test_critic.py::test_actor_critics_solve_the_iterated_game",),
        ),
        Row(
            36,
            "The entropy collapses or the lengths explode.",
            HOLDS,
            "One line says so within 20 steps, and what to change. Models that begin from nothing have no such line "
            "while the reward rises. Pretrained models have it in any case. They also have lines about truncation, "
            "groups of equal rewards, steps without success, and roles that play no more. A large distance to "
            "the reference policy has a line as well. `run.patience` ends a run whose evaluation improves no more, "
            "and the best step is kept.",
            (
                "runs/test_alarms.py::test_a_collapse_is_said_once_within_twenty_steps",
                "runs/test_alarms.py::test_pretrained_models_alarm_while_the_reward_rises",
                "runs/test_alarms.py::test_the_kept_runs_that_went_wrong_would_have_warned",
                "runs/test_alarms.py::test_a_run_says_its_alarms",
                "runs/test_best.py::test_a_run_without_improvement_ends_early_and_stays_ended",
                "runs/test_best.py::test_the_best_step_is_kept_and_a_killed_run_goes_on_with_it",
            ),
        ),
        Row(
            37,
            "The update of one agent changes another one.",
            HOLDS,
            "A model without a trained step stays the same bytes, its optimizer too. An adapter has gradients of its "
            "own role alone.",
            (
                f"{LEARNER}::test_models_without_a_trained_step_stay_byte_equal",
                f"{LOOP}::test_top_k_updates_only_models_with_selected_groups",
                "models/test_lora.py::test_gradients_reach_the_adapter_of_the_role_alone",
            ),
        ),
        Row(
            38,
            "Lengths vary from batch to batch, or a long batch does not fit into memory.",
            PART,
            "A bucket of sizes is one program. The memory of the largest step is computed before the run, and one "
            "line names the setting to lower. An allocation that fails later is a traceback.",
            (
                f"{GENERATE}::test_nothing_compiles_after_the_warm_up_of_a_bucket",
                f"{GENERATE}::test_many_rollouts_of_heavy_tailed_lengths_are_a_program_a_bucket_and_wait_for_nothing",
                "costs/test_complexity.py::test_an_update_that_is_too_large_names_the_flag",
            ),
        ),
    ),
    "Tokens and masks": (
        Row(
            39,
            "A sampled text is decoded and encoded again.",
            HOLDS,
            "The ids that were sampled are the ids that are trained on, also where encoding would give others.",
            (f"{HOST}::test_token_in_token_out",),
        ),
        Row(
            40,
            "The pad id is a stop id, there are several stop ids, or none is sampled.",
            HOLDS,
            "The mask is what was sampled, and the stop id counts once. Only the length limit counts as truncated.",
            (f"{GENERATE}::test_every_kind_of_end", f"{GENERATE}::test_pad_equal_to_a_stop_id"),
        ),
        Row(
            41,
            "Tokens of tools, of other agents or of padding enter the loss.",
            HOLDS,
            "A completion holds sampled tokens alone. Other values at masked places leave loss and gradient the same "
            "bits.",
            (
                f"{LOSSES}::test_masked_places_change_nothing",
                f"{LEARNER}::test_padding_and_masked_tokens_change_nothing",
            ),
        ),
        Row(
            42,
            "A chat template changes earlier turns.",
            HOLDS,
            "A later prompt begins with the earlier one and with what was sampled. A template that drops messages is "
            "refused. The tests of Qwen's templates need its tokenizers.",
            (
                f"{TOKENIZER}::test_bytes_prompts_only_grow",
                f"{TOKENIZER}::test_prompts_only_grow",
                f"{TOKENIZER}::test_templates_that_cannot_be_used",
            ),
        ),
        Row(
            43,
            "A text contains the name of a control token.",
            HOLDS,
            "It is encoded as text, for every added token of the tokenizer. The large tokenizers are tested where "
            "they are.",
            (f"{TOKENIZER}::test_content_never_becomes_control", f"{TOKENIZER}::test_tiny"),
        ),
        Row(
            44,
            "A text holds surrogates, NUL, or bytes that are no text.",
            PART,
            "It is encoded and decoded without an error. No test has a line of a megabyte in a prompt.",
            (
                f"{TOKENIZER}::test_lone_surrogates_do_not_crash",
                f"{TOKENIZER}::test_bytes_decode_any_bytes",
                f"{TOKENIZER}::test_round_trip",
            ),
        ),
        Row(
            45,
            "A prompt is longer than the limit.",
            HOLDS,
            "The middle of the longest message is cut, and the system message and the last header stay. Cuts are "
            "counted and said once.",
            (
                f"{TOKENIZER}::test_bytes_fit",
                f"{HOST}::test_a_prompt_that_is_too_long_is_cut_and_counted",
                f"{HEALTH}::test_cut_prompts_are_counted_and_said_once",
            ),
        ),
        Row(
            46,
            "The embedding has rows for ids that no token has.",
            HOLDS,
            "Such an id has the probability 0.",
            (f"{GENERATE}::test_padding_ids_are_never_sampled", f"{GENERATE}::test_padding_ids_have_no_probability"),
        ),
    ),
    "Agents, tools and memory": (
        Row(
            47,
            "The call of a tool cannot be read, or its arguments are wrong or huge.",
            HOLDS,
            "The agent reads a short error, and the episode goes on.",
            (
                f"{ASSISTANT}::test_bad_calls_are_answered_and_the_episode_goes_on",
                f"{RULES}::test_malformed_calls_are_refused_in_words",
            ),
        ),
        Row(
            48,
            "A tool raises, hangs or returns a huge text.",
            HOLDS,
            "A call that raises or hangs is an invalid reward, and the others are answered. Long observations are "
            "cut with a mark.",
            (
                f"{POOL}::test_an_exception_is_a_failure_in_its_place",
                f"{POOL}::test_a_hanging_call_times_out_and_the_others_are_answered",
                f"{ASSISTANT}::test_observations_are_cut_with_a_marker",
            ),
        ),
        Row(
            49,
            "A text of a tool gives orders to the agent.",
            PART,
            "Only a valid call of the agent changes the database, and policies are checked. No success rate of such "
            "attacks is measured.",
            (
                "envs/test_shop.py::test_any_call_is_answered_and_pure",
                "envs/test_shop.py::test_refunds_and_exchanges_follow_the_policy",
            ),
        ),
        Row(
            50,
            "An agent writes harmful entries into a memory.",
            PART,
            "An entry whose use lowers rewards loses weight and is evicted after a bounded number of uses. Entries "
            "have no origin and no trust.",
            (
                f"{MEMORY}::test_poison_above_lo_is_evicted_too",
                f"{MEMORY}::test_the_strongest_entry_that_turns_bad_is_gone_after_a_bounded_number_of_uses",
                f"{MEMORY}::test_a_bad_reward_never_raises_a_weight",
            ),
        ),
        Row(
            51,
            "A run is killed while a memory is written.",
            HOLDS,
            "The memory is in the checkpoint. The resumed run has the memory of the unbroken one to the byte.",
            (KILLS, f"{CHECKPOINT}::test_every_leaf_comes_back_byte_for_byte"),
        ),
        Row(
            52,
            "A memory is written a hundred thousand times.",
            HOLDS,
            "Its size is bounded, eviction is deterministic, and the median read takes less than 10 ms.",
            (f"{MEMORY}::test_a_long_run_keeps_its_size_is_deterministic_and_reads_fast",),
        ),
        Row(
            53,
            "Two agents delegate to each other without end.",
            HOLDS,
            "The episode ends after `max_turns` with a defined reward. The numbers of samples are those of the plan.",
            (
                f"{ASSISTANT}::test_delegation_without_end_ends_with_the_turns",
                f"{ASSISTANT}::test_a_specialist_that_never_answers_is_sent_back",
                f"{HOST}::test_counts_of_plans",
            ),
        ),
        Row(
            54,
            "An evaluation writes a memory that training reads.",
            HOLDS,
            "An evaluation reads the memory of training and returns figures alone. It has no way to write a memory.",
            reason="`Recipe.evaluate` returns no state, so a test could not fail.",
        ),
    ),
    "Configuration, data and files": (
        Row(
            55,
            "A configuration has a wrong key, type, value or file.",
            HOLDS,
            "One line names the key and what would be right, with exit code 2, before a device is touched.",
            (
                "cli/test_cli.py::test_error_is_one_line_and_exit_code_2",
                "test_config.py::test_fuzzed_config_builds_or_says_why",
                "test_config.py::test_fuzzed_override_builds_or_says_why",
                "test_config_fields.py::test_a_value_is_accepted_or_refused_in_one_line_with_its_key",
            ),
        ),
        Row(
            56,
            "A folder of weights is not whole, or does not fit.",
            HOLDS,
            "One line names the file, the tensor and the expected size. Mutated files load or end in one line.",
            (
                f"{WEIGHTS}::test_broken_directory",
                f"{WEIGHTS}::test_broken_shards",
                f"{WEIGHTS}::test_broken_header",
                "models/test_hf_config.py::test_refused_in_one_line",
                "experiments/test_fuzz_readers.py::test_mutated_files_load_or_end_in_one_line",
            ),
        ),
        Row(
            57,
            "Weights are exported and loaded by transformers.",
            HOLDS,
            "Logits agree to 1e-5 and greedy texts are equal. Reading the export gives the same bytes. Merged and "
            "separate adapters agree.",
            (
                f"{PARITY}::test_export_loads_in_transformers_and_comes_back_bit_exact",
                f"{PARITY}::test_greedy_text",
                "models/test_lora.py::test_merged_equals_unmerged",
            ),
        ),
        Row(
            58,
            "A data set is empty, broken, has rows twice, or shares rows with its test set.",
            PART,
            "The file, the line and the field are named. A training row that is also in the test set is left out and "
            "counted. Only equal texts count, not common phrases.",
            (
                "data/test_loaders.py::test_bad_lines_are_named",
                "data/test_loaders.py::test_duplicate_ids_are_refused",
                "data/test_loaders.py::test_windows_line_ends_are_fine",
                f"{CODE}::test_compressed_files",
                f"{SPLITS}::test_a_training_row_that_is_also_in_test_is_left_out_and_counted",
                f"{SPLITS}::test_an_overlap_is_refused",
            ),
        ),
        Row(
            59,
            "A folder of weights brings code.",
            PART,
            "Code in `auto_map` is refused, and nobody is asked on the terminal. Formats that run code when they are "
            "read have no reader. No test has a file that would leave a trace.",
            (
                "models/test_tokenizer_files.py::test_refused_in_one_line_with_the_file_and_the_key",
                "models/test_hf_config.py::test_refused_in_one_line",
            ),
        ),
        Row(
            60,
            "There is no network.",
            PART,
            "Data samples ship with the package. A name of the hub ends in one line with the command that fetches "
            "it. No test runs without network interfaces.",
            (
                "models/test_hub.py::test_without_a_network_one_line_has_the_command",
                "data/test_loaders.py::test_samples",
            ),
        ),
        Row(
            61,
            "The package is installed elsewhere, or with other versions.",
            PART,
            "The wheel has every file, and its command runs in an empty folder. An import loads nothing before its "
            "use. `make test-312` tests the newest JAX; the seconds of an import are not tested.",
            (
                "test_packaging.py::test_the_wheel_has_every_module_and_data_file",
                "test_packaging.py::test_the_installed_command_runs_in_an_empty_folder",
                "test_exports.py::test_no_export_is_imported_before_its_use",
            ),
        ),
    ),
    "Logs": (
        Row(
            62,
            "A run is killed and resumed: its logs.",
            HOLDS,
            "metrics.jsonl has each step once. TensorBoard hides what is written again, and W&B continues the same "
            "run.",
            (
                f"{METRICS}::test_resume_writes_each_step_once",
                f"{METRICS}::test_tensorboard_events_and_purge_on_resume",
                f"{METRICS}::test_wandb_continues_the_same_run",
            ),
        ),
        Row(
            63,
            "A service for logs is down, or the disk for logs is full.",
            HOLDS,
            "Training goes on with one warning. Lines that the disk refused are written later.",
            (
                f"{METRICS}::test_failing_backend_warns_once_and_training_goes_on",
                f"{METRICS}::test_full_disk_costs_no_step_and_warns_once",
            ),
        ),
        Row(
            64,
            "A run makes no progress.",
            HOLDS,
            "After the deadline of its stage the run ends. It says the stage, the step and the stacks of all threads.",
            (
                f"{PROCESSES}::test_a_run_that_hangs_ends_and_says_where",
                f"{PROCESSES}::test_when_one_hangs_all_say_where_they_wait_and_end",
            ),
        ),
        Row(
            65,
            "A failure happens and no metric shows it.",
            PART,
            "Every metric of a run is documented, and failures, cut prompts and skipped steps are counted. Some "
            "counters have no test that makes them larger than 0.",
            (
                f"{LOOP}::test_every_metric_of_a_run_is_documented",
                f"{METRICS}::test_nonfinite_values_are_null_and_counted",
                f"{HEALTH}::test_cut_prompts_are_counted_and_said_once",
                f"{HEALTH}::test_some_rewards_fail_and_the_run_goes_on_and_says_so",
            ),
        ),
    ),
}

INTRO = """# Reliability

`python -m experiments.reliability` writes this page.

Each row is one way in which a training run may fail.

- holds: what happens is what should, and the tests show it.
- **in part**: the row says what is missing.
- **not handled**: nothing is done.

A row without a test says why.
"""


def page() -> str:
    """The page."""
    counts = Counter(row.verdict for rows in PARTS.values() for row in rows)
    text = [INTRO, " ".join(f"{verdict.capitalize()}: {counts[verdict]}." for verdict in (HOLDS, PART, NOT))]
    for part, rows in PARTS.items():
        text += ["", f"## {part}", "", "| | scenario | | what happens | shown by |", "|" + " --- |" * 5]
        for row in rows:
            mark = row.verdict if row.verdict == HOLDS else f"**{row.verdict}**"
            shown = "<br>".join(f"`tests/{test}`" for test in row.tests) or row.reason
            text.append(f"| {row.number} | {row.scenario} | {mark} | {row.happens} | {shown} |")
    return "\n".join(text) + "\n"


def main(cfg: object, workdir: str | None, flag_values: flags.FlagValues) -> None:
    """Write the page."""
    Path(flag_values.page).write_text(page())


if __name__ == "__main__":
    flags.DEFINE_string("page", "docs/reliability.md", "Markdown file that is written.")
    config_flags.run(main, required=())
