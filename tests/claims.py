"""What the pages claim about behaviour without exception, and the name of the test that shows each, without ``test_``."""

KILLS = "trainings_that_are_killed_at_random_instants_end_in_the_same_bits"
EXACT = "exact_at_every_single_step"
NEVER_CALLED = "a_listener_that_can_never_fire_is_named_before_and_after"
REPEATED = "a_hundred_repeated_steps_are_equal_to_the_bit"
KILLED_SAVE = "a_run_that_is_killed_in_a_save_goes_on_at_the_one_before"
KILLED_ROLLBACK = "a_run_that_is_killed_in_a_rollback_ends_with_the_same_bits"
NO_PICKLE = "a_pickle_in_any_file_is_refused_and_never_runs"
CAPSULE = "the_step_is_repeated_to_the_bit_and_the_run_goes_on_as_without_a_capsule"
NO_LOGIN = "without_an_account_or_a_server_a_tracker_asks_nothing_in_a_terminal_and_the_run_goes_on"
NO_WAIT = "the_steps_do_not_wait_for_a_slow_one"
NO_CALL = "a_callback_that_overrides_nothing_has_no_listener_and_adds_no_call"
NO_GUESS = "a_mode_is_never_guessed"
RANKS = "on_as_many_ranks_it_continues_to_the_same_bits_inside_an_epoch"
LAYOUTS = "checkpoints_go_between_all_layouts_bit_exactly"

CHECKED_BY = {
    "docs/ask-and-steer.md": {
        "the weights are the same to the bit": "a_series_of_acts_is_repeated_to_the_same_bits",
        "also for a run that was killed around its acts": "a_run_that_is_killed_around_its_acts_ends_as_its_repeat",
        "and on multiple ranks": "two_ranks_repeat_a_run",
        "from no other site": "a_name_of_another_site_that_leads_here_is_refused",
        "are text, never HTML": "html_in_names_values_reasons_and_notes_is_text",
    },
    "README.md": {
        "A misspelled hook is an error": "a_hook_that_could_not_be_called_is_an_error_when_the_class_is_written",
        "mypy and pyright report the same mistake": "mypy_refuses_every_wrong_line_and_no_other",
        "`trainer.plan()` prints which callback runs": "it_names_the_listeners_in_order_with_cadence_and_limit",
        "names callbacks that can never run": NEVER_CALLED,
        "measures what each phase": "time_goes_to_the_phase_in_which_it_passes",
        "and each callback cost": "each_callback_at_each_moment_has_its_own_time",
        "the final weights are bit-identical": EXACT,
        "loader workers, dropout, gradient accumulation and bf16": "exact_with_workers",
        "Kill the process at any instant": KILLS,
        "the training ends with the same bits": KILLS,
        "with a plain `DataLoader` | the same bits": EXACT,
        "An error in a callback says which callback raised it": (
            "an_error_keeps_its_traceback_and_gains_one_line_that_names_the_inner_callback_where_and_when"
        ),
        "If an experiment tracker fails": "a_fault_that_disables_is_reported_once_and_the_run_goes_on_as_does_the_next",
        "They need no wrapper": "built_in_callbacks_watch_native_evaluations",
        "need only other import lines": "the_scripts_are_the_document_s_listings",
        "[repeats it](docs/repeat-a-step.md) with the same bits": REPEATED,
        "The numbers were recorded in a run": "what_is_generated_from_the_code_is_up_to_date",
        "trains a small network on handwritten digits": "the_demo_ends_well_and_its_test_accuracy_is_at_least_97_percent",
    },
    "docs/callbacks.md": {
        "so that it never reaches the weights": "a_loss_that_is_not_finite_never_reaches_the_weights",
        "A step only queues its record, and never waits": NO_WAIT,
    },
    "docs/capsule.md": {
        "are bit-identical to those of the run": CAPSULE,
        "continues bit-identically to one without `Capsule`": CAPSULE,
    },
    "docs/changes.md": {
        "A resume after that is bit-identical": "a_stretched_schedule_resumes_as_it_is_and_stretches_again",
    },
    "docs/checkpoints.md": {
        "If the process is killed at any instant, start the same command again. The resumed run ends bit-identically": KILLS,
        "A checkpoint is a folder that appears complete or not at all": KILLED_SAVE,
        "A result or weights that are not finite are never among the best": (
            "weights_that_are_not_finite_are_saved_and_flagged_and_never_the_best"
        ),
        "An inexact checkpoint never replaces an exact one": (
            "an_error_in_the_step_after_a_checkpoint_leaves_another_one_that_holds_the_gradients"
        ),
        "The newest checkpoint, and the newest from which the run can resume, are always kept": (
            "prune_keeps_the_given_names_the_newest_that_verifies_and_what_another_run_wrote"
        ),
        "replaced with a warning, and the run stays bit-identical": "a_killed_worker_is_replaced_and_the_batches_do_not_change",
        "The result is bit-identical to an uninterrupted run": (
            "a_signal_ends_the_step_saves_and_the_run_continues_to_the_same_bits"
        ),
        "another one is never used instead": (
            "a_damaged_best_or_a_newer_one_that_may_be_the_best_is_an_error_and_never_another_one"
        ),
        "gets the weights with which it ended, including those of": "the_model_gets_the_weights_with_which_the_run_ended",
        "are in no checkpoint: a warning says so": "statistics_of_batch_norm_that_no_checkpoint_has_are_named",
        "raises `CheckpointLostError` after everything is closed": "no_file_stays_open_after_a_disk_has_failed",
    },
    "docs/command-line.md": {"a warning for each callback that never runs": NEVER_CALLED},
    "docs/data.md": {
        "A run can resume at any batch, bit-identically. If": "a_resumed_run_is_bit_identical",
        "a run resumes inside an epoch, bit-identically": "a_run_continues_inside_an_epoch_to_the_same_bits_on_as_many_ranks",
        "A run resumes at any batch, bit-identically, if each loader can": "a_run_resumes_inside_an_epoch_bit_for_bit",
    },
    "docs/evaluation.md": {
        "Cadenza never guesses it": NO_GUESS,
        "NaN is never better than another value": "nan_is_never_better_and_says_so_once",
    },
    "docs/guides/from-fastnlp.md": {
        "`run(resume_from=...)` resumes bit-identically": "case_23_a_resumed_training_is_bit_identical_also_inside_a_window",
        "a resumed training is bit-identical": "case_23_a_resumed_training_is_bit_identical_also_inside_a_window",
        "executes only the constructors of the model's classes": "a_missing_file_is_named_and_weights_execute_no_code",
        "NaN is never better": "case_22_equal_is_not_better_and_nan_and_none_never_are",
    },
    "docs/guides/from-huggingface.md": {
        "a callback without events costs nothing": NO_CALL,
        "It is committed and deleted together with its checkpoint": (
            "a_killed_process_leaves_whole_checkpoints_and_the_next_one_cleans_up"
        ),
    },
    "docs/guides/from-keras.md": {"An event that a callback does not override costs nothing": NO_CALL},
    "docs/guides/from-lightning.md": {
        "A callback that overrides no hook costs nothing": NO_CALL,
        "those of `lightning.Trainer`, bit for bit on one CPU": "the_optimizers_of_every_form_train_as_in_lightning",
        "Neither executes pickled code": "hostile_code_is_not_executed",
        "restores the loader, the random generators and all callbacks bit-identically": (
            "a_run_that_continues_in_mid_epoch_ends_with_the_same_bits"
        ),
        "so a run resumes exactly, even with `make_pruning_permanent=True`": (
            "a_callback_has_its_effect_and_resumes_to_the_same_bits"
        ),
    },
    "docs/guides/from-nemo.md": {
        "depends on the seed of the run, so that it can resume exactly": "a_killed_and_resumed_training_is_bit_identical",
        "everything else that a run needs to resume bit-identically": "a_killed_and_resumed_training_is_bit_identical",
        "Pickled code is never executed": "a_file_with_pickled_code_is_an_error_and_the_code_does_not_run",
        "continues after the stored step, bit-identically": "a_killed_and_resumed_training_is_bit_identical",
    },
    "docs/guides/clusters.md": {
        "end bit-identically": "a_job_that_another_preempts_saves_and_continues_when_it_gets_its_nodes_again",
    },
    "docs/guides/from-pytorch-accelerated.md": {
        "reading it executes nothing": NO_PICKLE,
        "`resume_from` resumes bit-identically": "a_resumed_training_is_bit_identical",
        "gives exactly the original's rates": "after_a_warm_up_the_rates_of_the_original_are_an_option",
    },
    "docs/guides/from-your-own-loop.md": {
        "The weights are bit-identical to those of the loop above": "the_first_stages_train_the_weights_of_the_loops_by_hand",
        "and ends bit-identically to an uninterrupted run": "the_loop_resumes_bit_for_bit_with_what_it_keeps",
        "gets bit-exact resume": "a_script_that_is_killed_ends_in_the_same_bits",
    },
    "docs/guides/scale.md": {
        "and never destroys it": "a_process_group_that_exists_is_used_and_left_alone",
        "resume from the newest checkpoint, bit-identically": "after_an_error_it_is_started_again_and_ends_with_the_same_bits",
        "resumes bit-identically on the same number of ranks": RANKS,
        "not bit-identical, because sums are added in another order": "it_is_said_what_is_not_the_same",
    },
    "docs/guides/mesh.md": {
        "are read on any number of ranks": "checkpoints_of_stages_go_to_all_other_layouts",
        "A resume on the same arrangement is bit-identical": "a_run_goes_on_in_the_same_layout_to_the_same_bits",
    },
    "docs/guides/sharded-models.md": {
        "Clipping, checkpoints and `Ema` work with it, bit-identically": (
            "offloaded_shards_train_and_resume_to_the_bits_of_those_that_are_not"
        ),
        "are bit-identical to those of DDP and of one process": (
            "the_initial_values_are_the_same_to_the_bit_with_every_driver_and_number_of_ranks"
        ),
        "go between all layouts: bit-exact weights and optimizer states": LAYOUTS,
        "a resume on the same layout is bit-identical": (
            "a_run_resumes_with_the_same_layout_to_the_same_bits_and_dropout_is_that_of_the_data"
        ),
        "On the same number of ranks, a run resumes bit-identically": RANKS,
    },
    "docs/index.md": {"Kill the process at any instant": KILLS, "the training ends with the same bits": KILLS},
    "docs/logging.md": {
        "It always keeps the first and the newest value": "beyond_the_limit_an_even_view_is_kept_with_the_first_and_the_newest",
        "never a record from more than a second before the last one": (
            "no_line_waits_longer_than_the_bound_if_the_thread_does_not_run"
        ),
    },
    "docs/moments.md": {
        "From here on, `on_fit_end` is always called": "every_start_has_its_end_wherever_a_callback_fails",
        "The first error is always the one that `fit` raises": "the_first_error_is_never_replaced_and_later_ones_are_attached",
        "the listeners that never ran, with the reason": (
            "listeners_that_did_not_fire_are_listed_with_the_reason_but_not_at_an_end_that_did_not_come"
        ),
        "Cadenza never calls a callback at a moment that the callback does not override": (
            "an_idle_callback_adds_no_call_to_a_step_or_an_evaluation"
        ),
    },
    "docs/recipes/stateful-dataloader.md": {
        "resumes exactly with Cadenza, with any sampler and any number of workers": (
            "any_map_style_loader_resumes_at_any_batch_and_has_other_numbers_in_each_epoch"
        ),
    },
    "docs/recipes/text-generation.md": {
        "The weights of a run are bit-identical with and without samples": (
            "the_texts_do_not_change_the_training_and_depend_on_the_weights_alone"
        ),
    },
    "docs/recipes/timm-schedulers.md": {
        "the rates continue exactly": "a_run_that_continues_has_the_rates_and_weights_of_one_that_does_not_stop",
    },
    "docs/recipes/transformers-schedulers.md": {
        "the rates continue exactly": "a_run_that_continues_has_the_rates_and_weights_of_one_that_does_not_stop",
    },
    "docs/recover.md": {"A run that is killed meanwhile and resumed ends bit-identically": KILLED_ROLLBACK},
    "docs/reliability.md": {
        "Kill the process at any instant": KILLS,
        "the final weights are bit-identical": EXACT,
        "runs with CUDA graphs then resumed bit-identically": "a_run_that_a_signal_ended_continues_to_the_same_bits",
        "records and history as an uninterrupted run, bit for bit": EXACT,
        "It never starts from the beginning without a message": (
            "a_damaged_newest_is_skipped_with_its_reason_and_where_all_are_damaged_nothing_is_started"
        ),
        "it never returns to the abandoned branch": "a_rollback_holds_before_the_new_branch_has_saved_anything",
        "It drops no row of `metrics.jsonl` without a copy": "rows_without_a_run_json_are_kept_in_a_copy",
        "never executes content of a checkpoint": NO_PICKLE,
        "Results do not depend on the number of loader workers": (
            "weights_do_not_depend_on_workers_logging_or_how_often_one_evaluates"
        ),
    },
    "docs/repeat-a-step.md": {
        "are bit-identical to those of the run": REPEATED,
        "compared bit by bit with those of the repeated steps": REPEATED,
    },
    "docs/sinks.md": {
        "A sink never overwrites other data": "a_file_that_exists_and_that_of_the_run_itself_are_refused_and_not_touched",
        "The sink never prompts for a login": NO_LOGIN,
        "and never waits for a disk or a server": NO_WAIT,
    },
    "docs/speed.md": {
        "continues without one, bit-identically": "a_run_that_was_not_fused_goes_on_as_it_was",
        "A resumed run ends bit-identically": "a_fused_run_that_is_continued_ends_with_the_same_bits",
        "A run that resumes with the same callbacks ends bit-identically": "a_resumed_run_ends_with_the_same_bits",
    },
    "docs/start.md": {
        "the weights are bit-identical to those of the loop": "a_run_ends_with_the_bits_of_a_loop_that_calls_optimizer_step",
        "names callbacks that can never run": NEVER_CALLED,
    },
    "docs/the-run.md": {
        "Reading an attribute never communicates with other ranks": "a_debugger_may_look_at_everything_of_a_run_on_one_rank",
        "and never waits for the device": "hooks_see_the_batch_and_the_parts_and_the_loss_waits_for_nobody",
    },
    "docs/troubleshooting.md": {"names those that never run": NEVER_CALLED, "A hook that can never run": NEVER_CALLED},
    "docs/writing-a-callback.md": {
        "shows that a run with the callback resumes bit-identically": (
            "a_trainer_that_continues_exactly_passes_in_fresh_processes"
        ),
    },
}
