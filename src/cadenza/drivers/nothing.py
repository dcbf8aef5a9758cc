"""A backward pass that adds nothing, for a rank that takes part in the reduction of gradients without a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def backward_of_nothing(parameters: Sequence[Tensor], sparse: set[Tensor]) -> None:
    """Add a gradient of zeros to each parameter, through autograd, so that hooks of the gradients are called.

    Args:
        parameters: The parameters, which require a gradient.
        sparse: Those that have a sparse gradient.
    """
    if parameters:
        marks = [parameter in sparse for parameter in parameters]
        torch.autograd.backward([_Nothing.apply(marks, *parameters)])  # type: ignore[no-untyped-call]


def leaves_of(loss: Tensor) -> set[Tensor]:
    """Return the tensors without a history to which the gradient of `loss` flows. Numbers are not read."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    ways = [loss.grad_fn]
    while ways:
        node = ways.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.add(leaf)
        ways += [following for following, _ in node.next_functions]
    return found


def sparse_in(model: nn.Module) -> set[Tensor]:
    """Return the weights of embeddings with sparse gradients."""
    embeddings = (one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
    return {one.weight for one in embeddings if one.sparse}


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sparse: list[bool], *parameters: Tensor) -> Tensor:
        ctx.sparse, ctx.parameters = sparse, parameters
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *(_zeros(one, sparse=sparse) for one, sparse in zip(ctx.parameters, ctx.sparse, strict=True))


def _zeros(like: Tensor, *, sparse: bool) -> Tensor:
    if not sparse:
        return torch.zeros_like(like)
    rows = torch.zeros(1, 0, dtype=torch.long, device=like.device)
    values = like.new_zeros(0, *like.shape[1:])
    return torch.sparse_coo_tensor(rows, values, like.shape, is_coalesced=True, check_invariants=False)
