"""The first listing of the guide, with what its dots stand for filled in; its evaluator does what the guide tells of it."""

import cadenza.compat.nemo10 as nemo
from spoken import eval_digit, eval_scores, neural_factory as nf, train_loss


def user_iter_callback(values_dict, global_var_dict):
    right = values_dict["scores"][0].argmax(1) == values_dict["digit"][0]
    global_var_dict.setdefault("right", []).extend(right.tolist())


def user_epochs_done_callback(global_var_dict):
    accuracy = sum(global_var_dict["right"]) / len(global_var_dict["right"])
    nemo.logging.info(f"Accuracy {accuracy}")
    return {"accuracy": accuracy}


loggercallback = nemo.core.SimpleLossLoggerCallback(tensors=[train_loss], step_freq=10, tb_writer=nf.tb_writer)
savercallback = nemo.core.CheckpointCallback(folder=nf.checkpoint_dir, epoch_freq=4)
evalcallback = nemo.core.EvaluatorCallback(
    eval_tensors=[eval_scores, eval_digit],
    user_iter_callback=user_iter_callback,
    user_epochs_done_callback=user_epochs_done_callback,
    tb_writer=nf.tb_writer,
    eval_step=12,
    wandb_name="spoken",
    wandb_project="digits",
)

nf.train(
    callbacks=[loggercallback, savercallback, evalcallback],
    tensors_to_optimize=[train_loss],
    optimizer="adam",
    optimization_params={"num_epochs": 12, "lr": 0.003},
)
