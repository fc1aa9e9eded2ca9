"""The order in which training prompts are drawn: seeded, resumable, every prompt once an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dynamo_megatron.data.problems import DataError
from dynamo_megatron.types import DataCursor, Prompt


class ShuffledPrompts:
    """Prompts in a fresh shuffle each epoch. Implements ``protocols.PromptSource``.

    The shuffles, one after the other, are one endless sequence, and a step takes the next ``count``
    prompts of it; where an epoch ends within a step, the step goes on into the next one. Two things
    then hold together: **every prompt is drawn once in each epoch**, and **the prompts of a step
    differ**. For the second, the new epoch's part of such a step skips the prompts that the step
    already holds; they stay in the new epoch's shuffle and come after that step.

    An epoch's shuffle depends on the seed, the epoch and the prompts' ids (sha256; no library's
    generator), not on the order of the files, and what a step skipped follows from ``count`` and
    the cursor, so that the cursor is all a resumed run needs. If ``count`` changes on resume, the
    prompts of a step still differ, but the epoch under way may repeat some and miss others.

    Args:
        prompts: at least one, with distinct ids.
        seed: the run's seed.

    Raises:
        DataError: no prompt, or an id that occurs twice.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        self._by_id = {prompt.id: prompt for prompt in prompts}
        if not prompts or len(self._by_id) != len(prompts):
            raise DataError(
                f"{len(prompts)} prompts with {len(self._by_id)} different ids cannot be shuffled: "
                "there must be at least one, and none twice. Load them with load_problems, which "
                "removes duplicates."
            )
        self._seed = seed
        self._last_order: tuple[tuple[int, int, int], list[str]] | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def take(self, count: int, cursor: DataCursor) -> tuple[list[Prompt], DataCursor]:
        """The next ``count`` different prompts and the cursor after them.

        Args:
            count: prompts of a step, the same in every step of a run.
            cursor: where to go on; ``DataCursor()`` is the start.

        Raises:
            DataError: there are fewer than ``count`` prompts, or the cursor lies outside the data.
        """
        if not 1 <= count <= len(self):
            raise DataError(
                f"a step cannot draw {count} different prompts from {len(self)}. Set "
                f"data.prompts_per_step to at most {len(self)}, or add problems."
            )
        if not (0 <= cursor.position < len(self) and cursor.epoch >= 0):
            raise DataError(
                f"the cursor (epoch {cursor.epoch}, position {cursor.position}) lies outside the "
                f"data of {len(self)} prompts: it belongs to other data. Resume with the data the "
                "run was started with."
            )
        ids = self._order(cursor, count)[cursor.position : cursor.position + count]
        missing = count - len(ids)
        end = DataCursor(epoch=cursor.epoch, position=cursor.position + count)
        if end.position >= len(self):
            end = DataCursor(epoch=cursor.epoch + 1, position=missing)
        if missing:
            ids = ids + self._order(end, count)[:missing]
        return [self._by_id[prompt_id] for prompt_id in ids], end

    def digest(self) -> str:
        """Hash of the set of prompt ids: equal on two ranks when they hold the same data."""
        return hashlib.sha256("\n".join(sorted(self._by_id)).encode()).hexdigest()

    def _order(self, cursor: DataCursor, count: int) -> list[str]:
        """Prompt ids of the cursor's epoch in the order in which steps of ``count`` draw them."""
        epoch, head = cursor.epoch, cursor.position % count
        # The first `head` prompts of an epoch complete a step that began in the epoch before, and
        # so depend on its last `count - head`; back to an epoch that began with a step.
        unfinished: list[tuple[int, int, int]] = []
        order = None
        while order is None:
            key = (epoch, head, count)
            if self._last_order is not None and self._last_order[0] == key:
                order = self._last_order[1]
            elif epoch == 0 or head == 0:
                order = self._shuffle(epoch)
            else:
                unfinished.append(key)
                epoch, head = epoch - 1, (len(self) - (count - head)) % count
        for epoch, head, _ in reversed(unfinished):
            order = order_after(order[len(self) - (count - head) :], self._shuffle(epoch), head)
        self._last_order = ((cursor.epoch, cursor.position % count, count), order)
        return order

    def _shuffle(self, epoch: int) -> list[str]:
        salt = hashlib.sha256(f"prompt order {self._seed} {epoch} ".encode())

        def key(prompt_id: str) -> bytes:
            digest = salt.copy()
            digest.update(prompt_id.encode())
            return digest.digest()

        return sorted(self._by_id, key=key)


def order_after(tail: Sequence[str], shuffle: Sequence[str], head: int) -> list[str]:
    """Reorder a shuffle so that none of its first ``head`` ids is in ``tail``.

    Args:
        tail: ids of the step that the new epoch completes.
        shuffle: the new epoch's shuffle; at least ``head`` of its ids are not in ``tail``.
        head: ids that the step still needs.

    Returns:
        The first ``head`` ids outside ``tail``, then all others, both as in the shuffle.
    """
    present = set(tail)
    first = [item for item in shuffle if item not in present][:head]
    taken = set(first)
    return first + [item for item in shuffle if item not in taken]
