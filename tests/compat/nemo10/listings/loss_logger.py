"""The listings of SimpleLossLoggerCallback: what to print, what to write, and the callback. Its last bracket too many is gone."""

import cadenza.compat.nemo10 as nemo
from spoken import neural_factory, train_loss

from cadenza.compat.nemo10 import logging
def my_print_func(tensors):
    logging.info(f"Loss {tensors[0]}")

def my_get_tb_values(tensors):
    return [("Train_Loss", tensors[0])]

from functools import partial

loggercallback = nemo.core.SimpleLossLoggerCallback(
    # 定义我们想要传给print_func和get_tb_values的张量
    tensors=[train_loss],
    # 传入我们想要用的打印函数
    print_func=partial(my_print_func),
    # 传入可以返回tensorboard标签和张量的函数
    get_tb_values=my_get_tb_values,
    # 我们想要回调这个函数的频次
    step_freq=500,
    # 我们想要用的 tensorboard writer, 
    # 如果 create_tb_writer 在 neural_factory
    # 中设置为True, 那么它会自动在 neural_factory 创建的时候被创建
    tb_writer=neural_factory.tb_writer)

neural_factory.train(
    callbacks=[loggercallback],
    tensors_to_optimize=[train_loss],
    optimizer="sgd",
    optimization_params={"max_steps": 501, "lr": 0.001},
)
