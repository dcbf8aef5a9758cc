"""The listing of CheckpointCallback as it stands, which never saves; and with a frequency, twice."""

import cadenza.compat.nemo10 as nemo
from spoken import neural_factory, train_loss

from functools import partial

loggercallback = nemo.core.CheckpointCallback(
    # 保存 checkpoints 的目录
    # 注意: Neural Factory 会自动创建 checkpoint 目录
    folder=neural_factory.checkpoint_dir,
    # 如果是None, CheckpointCallback 在训练开始的时候回从 folder
    # 中加载模型
    # 否则的话, CheckpointCallback 会尝试从 load_from_folder 中加载
    load_from_folder=None,
    # Checkpointing 回调频次(步数)
    step_freq=-1,
    # Checkpointing 回调频次(轮数)
    epoch_freq=-1,
    # 需要保存的 checkpoint 数
    checkpoints_to_keep=4,
    # 设置为 True, CheckpointCallback 会触发 error 如果加载失败
    force_load=False
)

for callback, steps in (
    (loggercallback, 3),
    (nemo.core.CheckpointCallback(neural_factory.checkpoint_dir, step_freq=2), 5),
    (nemo.core.CheckpointCallback(neural_factory.checkpoint_dir, step_freq=2, force_load=True), 8),
):
    run = neural_factory.train(
        callbacks=[callback],
        tensors_to_optimize=[train_loss],
        optimization_params={"max_steps": steps, "lr": 0.001},
        reset=True,
    )
    print("steps", run.progress.origin.step, "to", run.progress.step)
