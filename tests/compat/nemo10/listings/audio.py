"""The listing that writes a sound."""

import cadenza.compat.nemo10 as nemo
from spoken import neural_factory, train_loss, wave_tensor

def log_to_tb_func(swriter, tensors, step):
    swriter.add_scalar("Train_Loss", tensors[0], step)
    swriter.add_audio("Train_Sample", tensors[1][0], step)

loggercallback = nemo.core.SimpleLossLoggerCallback(
    tensors=[train_loss, wave_tensor], log_to_tb_func=log_to_tb_func, step_freq=2, tb_writer=neural_factory.tb_writer
)
neural_factory.train(
    callbacks=[loggercallback],
    tensors_to_optimize=[train_loss],
    optimization_params={"max_steps": 5, "lr": 0.001},
)
