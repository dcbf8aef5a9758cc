"""Several optimizers, and calls of torch beside the run: in a `step_fn`, over `trainer.steps()`, and with `attach`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import LBFGS, SGD, Optimizer

from cadenza import Run, Trainer, attach
from cadenza.errors import LossError

WAYS = ("step_fn", "steps", "attach")
MIXED = "takes the sum of gradients from before and after"
Play = Callable[[Any, Any], object]
"""What the user's code does in a step, with the variable that has the verbs of the run, and the players."""


class Players(nn.Module):
    """A generator and a discriminator, or an actor and a critic, with a trunk that they may share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.maker, self.judge = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.points = torch.randn(8, 2)

    def optimizers(self) -> list[Optimizer]:
        return [SGD([*self.maker.parameters(), *self.trunk.parameters()], 0.1), SGD(self.judge.parameters(), 0.1)]

    def judged(self) -> Tensor:
        return softplus(-self.judge(self.points)).mean() + softplus(self.judge(self.maker(self.points).detach())).mean()

    def made(self) -> Tensor:
        return softplus(-self.judge(self.maker(self.points))).mean()

    def values(self) -> Tensor:
        return self.judge(self.trunk(self.points)).square().mean()  # type: ignore[no-any-return]

    def policy(self) -> Tensor:
        return self.maker(self.trunk(self.points)).square().mean()  # type: ignore[no-any-return]


def train(way: str, play: Play, players: Players, *, steps: int = 3, **arguments: Any) -> Run:
    arguments = {"progress": False, "device": "cpu", **({} if way == "attach" else {"max_epochs": 1}), **arguments}
    optimizers = arguments.pop("optimizers", None) or players.optimizers()
    if way == "attach":
        with attach(players, optimizers, max_steps=steps, **arguments) as loop:
            while not loop.over():
                with loop.step():
                    play(loop, players)
        return loop.run
    if way == "steps":
        trainer = Trainer(players, optimizers, [0] * steps, **arguments)
        for step in trainer.steps():
            for _ in step:
                play(step, players)
        return trainer.run

    def step_fn(run: Run, _: Any) -> Tensor:
        play(run, players)
        return torch.zeros(())

    return Trainer(players, optimizers, [0] * steps, step_fn=step_fn, **arguments).fit()


def optimizers_of(verbs: Any) -> Any:
    return getattr(verbs, "run", verbs).optimizers


# -- gradients from before and after the update of another optimizer -----------------------------------


def gan(cure: str) -> Play:
    """Return a step of a GAN in which the loss of the maker leaves gradients in the judge, unless there is a cure."""

    def play(verbs: Any, players: Players) -> None:
        for optimizer, loss_of in zip(optimizers_of(verbs)[::-1], (players.judged, players.made), strict=True):
            if cure.startswith("zero"):
                optimizer.zero_grad(set_to_none=cure == "zero_grad")
            verbs.backward(loss_of(), **({"into": optimizer} if cure == "into" else {}))
            verbs.update(optimizer)

    return play


@pytest.mark.parametrize("way", ["step_fn", "attach"])
def test_gradients_that_mix_are_a_warning_with_the_cures_and_each_cure_trains_as_the_loop_by_hand(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    by_hand = Players()
    for _ in range(3):
        for optimizer, loss_of in zip(by_hand.optimizers()[::-1], (by_hand.judged, by_hand.made), strict=True):
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()
    for cure in ("into", "zero_grad", "zeros"):
        players = Players()
        train(way, gan(cure), players)
        assert all(map(torch.equal, players.parameters(), by_hand.parameters())), cure
    assert MIXED not in caplog.text
    players = Players()
    train(way, gan("none"), players)
    assert not torch.equal(players.judge.weight, by_hand.judge.weight)
    [text] = [record.message for record in caplog.records if MIXED in record.message]
    name = "run" if way == "step_fn" else "loop"
    for part in (
        r"run.optimizers[1] (SGD) in step 2",
        "run.optimizers[0] (SGD)",
        f"{name}.backward(loss, into=",
        ".zero_grad()",
    ):
        assert part in text


def joint(verbs: Any, players: Players) -> None:
    verbs.backward(players.policy() + players.values())
    for optimizer in optimizers_of(verbs):
        verbs.update(optimizer)


def shared_trunk(verbs: Any, players: Players) -> None:
    verbs.backward(players.policy())
    verbs.backward(players.values())
    for optimizer in optimizers_of(verbs):
        verbs.update(optimizer)


def own_accumulation(verbs: Any, players: Players) -> None:
    progress = getattr(verbs, "run", verbs).progress
    verbs.backward(players.policy() + players.values())
    if progress.step % 3 == 2:
        for optimizer in optimizers_of(verbs):
            verbs.update(optimizer)


def lbfgs(verbs: Any, players: Players) -> None:
    maker, judge = optimizers_of(verbs)

    def closure() -> Tensor:
        maker.zero_grad()
        loss = players.policy()
        loss.backward()
        return loss

    verbs.update(maker, closure)
    verbs.backward(players.judge(players.points).square().mean())
    verbs.update(judge)


def ppo(verbs: Any, players: Players) -> None:
    actor, critic = optimizers_of(verbs)
    for _ in range(4):
        verbs.backward(players.maker(players.points).square().mean())
        verbs.update(actor)
        verbs.backward(players.judge(players.points).square().mean())
        verbs.update(critic)


def wgan_gp(cure: str) -> Play:
    def play(verbs: Any, players: Players) -> None:
        maker, critic = optimizers_of(verbs)
        for turn in range(4):
            optimizer = critic if turn < 3 else maker
            made = players.maker(players.points)
            if cure == "zero_grad":
                players.zero_grad()
            loss = -players.judge(made).mean()
            if optimizer is critic:
                between = made.detach().requires_grad_()
                slope = torch.autograd.grad(players.judge(between).sum(), between, create_graph=True)[0]
                loss = players.judge(made.detach()).mean() + (slope.norm(dim=1) - 1).square().mean()
            verbs.backward(loss, **({"into": optimizer} if cure == "into" else {}))
            verbs.update(optimizer)

    return play


SILENT = [joint, shared_trunk, own_accumulation, lbfgs, ppo, wgan_gp("into"), wgan_gp("zero_grad")]


@pytest.mark.parametrize("way", ["step_fn", "attach"])
@pytest.mark.parametrize("play", SILENT, ids=lambda one: one.__qualname__.partition(".")[0])
def test_gradients_that_are_meant_to_be_added_say_nothing(play: Play, way: str, caplog: pytest.LogCaptureFixture) -> None:
    players = Players()
    optimizers = [LBFGS(players.maker.parameters()), SGD(players.judge.parameters(), 0.1)] if play is lbfgs else None
    train(way, play, players, steps=7, optimizers=optimizers)
    assert [record.message for record in caplog.records if "gradients" in record.message or "update" in record.message] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_into_reaches_the_parameters_of_its_optimizers_alone(precision: str) -> None:
    def play(run: Run, players: Players) -> None:
        maker, judge = run.optimizers
        players.maker.weight.requires_grad_(False)
        run.backward(players.made(), into=maker)  # reaches no trunk
        assert [name for name, one in players.named_parameters() if one.grad is not None] == ["maker.bias"]
        run.backward(players.made(), into=[maker, judge])
        assert players.judge.bias.grad is not None
        for given, error in ((SGD([nn.Parameter(torch.zeros(1))], 0.1), ValueError), ([], LossError)):
            with pytest.raises(error):
                run.backward(players.made(), into=given)
        run.update()

    train("step_fn", play, Players(), steps=1, precision=precision)


# -- calls of torch instead of the verbs ---------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 40])
@pytest.mark.parametrize("call", ["step", "backward", "both"])
@pytest.mark.parametrize("way", WAYS)
def test_a_call_of_torch_beside_the_run_is_an_error_in_the_step_in_which_it_first_happens(
    way: str, call: str, first: int
) -> None:
    def play(verbs: Any, players: Players) -> None:
        by_hand = getattr(verbs, "run", verbs).progress.step >= first
        if not by_hand or call != "both":
            verbs.backward(players.policy())
        if by_hand and call != "step":
            players.policy().backward()
        if by_hand and call != "backward":
            optimizers_of(verbs)[0].step()
        verbs.update()

    name = {"step_fn": "run", "steps": "step", "attach": "loop"}[way]
    message = rf"step {first + 1}.*Call {name}\.backward\(loss\) instead of loss\.backward\(\)"
    if call != "backward":
        message = rf"optimizer\.step\(\) was called in step {first + 1}, beside the update of the run\. Remove it from .*{name}"
    with pytest.raises(LossError, match=message):
        train(way, play, Players(), steps=first + 2)


@pytest.mark.parametrize("way", WAYS)
def test_calls_that_the_updates_do_not_take_are_free(way: str, caplog: pytest.LogCaptureFixture) -> None:
    other = nn.Linear(2, 1)
    own = SGD(other.parameters(), 0.1)

    def play(verbs: Any, players: Players) -> None:
        other(players.points).mean().backward()
        own.step()
        players.policy().backward()  # such as for gradients of the inputs
        players.zero_grad(set_to_none=getattr(verbs, "run", verbs).progress.step > 0)
        verbs.backward(players.policy() + players.values())
        nn.utils.clip_grad_norm_(players.parameters(), 0.1)
        verbs.update()

    players = Players()
    train(way, play, players)
    assert "update" not in caplog.text
    optimizer = players.optimizers()[0]
    players.policy().backward()
    optimizer.step()  # after the run, they are the user's own again


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("steps", "epochs", "said"), [(4, 2, 4), (4, 1, 4), (104, 1, 100)])
def test_a_run_that_updates_nothing_is_warned_once_and_not_stopped(
    steps: int, epochs: int, said: int, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    limit = {} if way == "attach" else {"max_epochs": epochs}
    run = train(way, lambda verbs, players: None, Players(), steps=steps, **limit)
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert caplog.text.count(f"the first {said} steps of this run had no update, so the weights did not change. Call ") == 1
    assert caplog.text.count("had no update") == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_begins_with_a_replay_buffer_is_not_warned(way: str, caplog: pytest.LogCaptureFixture) -> None:
    def play(verbs: Any, players: Players) -> None:
        if getattr(verbs, "run", verbs).progress.step >= 90:
            verbs.backward(players.policy() + players.values())
            verbs.update()

    train(way, play, Players(), steps=100)
    assert "update" not in caplog.text


# -- closures ------------------------------------------------------------------------------------------


def test_mistakes_with_a_closure_name_the_call() -> None:
    def refused(*arguments: Any, **options: Any) -> None:
        players = Players()
        optimizers = [LBFGS(players.maker.parameters()), SGD(players.judge.parameters(), 0.1)]

        def play(run: Run, _: Players) -> None:
            run.update(*(run.optimizers[one] if isinstance(one, int) else one for one in arguments))

        train("step_fn", play, players, optimizers=optimizers, **options)

    for arguments, message in (
        ((), "needs a closure, and none"),
        ((0,), "needs a closure"),
        ((0, 1, int), "for one optimizer"),
    ):
        with pytest.raises(ValueError, match=rf"{message}.*run\.update\(optimizer, closure\)"):
            refused(*arguments)
    with pytest.raises(ValueError, match=r"fp16.*no closure"):
        refused(0, int, precision="fp16")
    with pytest.raises(LossError, match=r"Remove it from step_fn: run\.update\(optimizer, closure\) updates"):
        train(
            "step_fn",
            lambda run, _: run.optimizers[0].step(int),
            players := Players(),
            optimizers=[LBFGS(players.parameters())],
        )
