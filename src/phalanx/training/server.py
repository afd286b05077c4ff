"""Training behind a trusted server, as others would do it: for comparison.

Every peer sends its gradient, the server combines them by one of the rules in ``phalanx.baselines`` and all apply the
result. Nobody is checked and nobody is banned. Batches, attacks and optimizer are those of the protocol.
"""

from __future__ import annotations

from random import Random

import msgspec
import torch

from phalanx import events
from phalanx.attacks import Attack, Insider, Plot, list_parts
from phalanx.baselines.aggregators import Baseline
from phalanx.core.config import Config
from phalanx.core.crypto import Signer, compute_digest
from phalanx.core.membership import Duties, compute_batch_seed, make_genesis
from phalanx.core.verification import prepare_gradient
from phalanx.core.wire import WIRE_TYPES
from phalanx.training.checkpoints import Checkpoint
from phalanx.training.machine import Trainer, Workshop
from phalanx.training.recorder import Recorder


class ServerRun:
    """Peers and a server, from the beginning or from a checkpoint."""

    def __init__(
        self,
        config: Config,
        signers: list[Signer],
        attackers: dict[bytes, Attack],
        workshop: Workshop,
        recorder: Recorder,
        combine: Baseline,
        bytes_sent: int,
        checkpoint: Checkpoint | None = None,
        seed: int = 0,
    ) -> None:
        self._config, self._workshop, self._recorder = config, workshop, recorder
        self._combine, self._bytes = combine, bytes_sent
        self._attackers = attackers
        self._trainer = Trainer(workshop)
        self._view = make_genesis(config)
        if checkpoint is not None:
            self._trainer.digests = {step: workshop.add(state) for step, state in checkpoint.states.items()}
            self._view = msgspec.structs.replace(self._view, step=checkpoint.step, randomness=checkpoint.randomness)
        plot = Plot(random=Random(seed))
        self._insiders = {
            signer.key: Insider(signer, config, plot, oracle=self._trainer)
            for signer in signers
            if signer.key in attackers
        }

    def run(self) -> None:
        """Go on until the end, or until the recorder wants to stop and the checkpoint is written."""
        while self._view.step < self._config.steps:
            self._take_step()
            step = self._view.step
            if step >= self._config.steps or self._recorder.is_checkpoint_due(step):
                self._write()
                if self._recorder.interrupted:
                    return

    def _take_step(self) -> None:
        view, config = self._view, self._config
        wire, rows, losses = WIRE_TYPES[config.wire], [], []
        for key in view.roster:
            seed = compute_batch_seed(config, view.randomness, view.step, key)
            state = self._trainer.digests[view.step]
            gradient, loss = self._workshop.compute(state, seed)
            insider = self._insiders.get(key)
            if insider is None:
                losses.append(loss)
            else:
                insider.view, insider.duties = view, Duties((), view.roster, (), 0)
                for attack in list_parts(self._attackers[key]):
                    if attack.is_active(insider):
                        gradient = attack.on_gradient(insider, view.step, seed, gradient)
            rows.append(wire.round(prepare_gradient(gradient, config.cap, wire)).float())
        aggregate = self._combine(torch.stack(rows), config.byzantine)
        self._trainer.apply(view.step, aggregate)
        digest = self._trainer.hash_state(view.step + 1)
        self._recorder.add(
            events.StepFinished(
                step=view.step,
                attempt=0,
                members=len(view.roster),
                loss=sum(losses) / len(losses) if losses else None,
                tau=None,
                bytes_sent=self._bytes * len(view.roster),
                seconds=None,
                state=digest.hex(),
            )
        )
        randomness = compute_digest("randomness of a server", view.randomness)
        self._view = msgspec.structs.replace(view, step=view.step + 1, randomness=randomness)
        self._recorder.evaluate(view.step + 1, self._workshop.get(digest).parameters)
        self._workshop.forget(set(self._trainer.digests.values()))

    def _write(self) -> None:
        step = self._view.step
        states = {step: self._workshop.get(self._trainer.digests[step])}
        history = dict(self._workshop.parameters)
        self._recorder.write_checkpoint(
            Checkpoint(
                run=self._config.run, step=step, states=states, history=history, randomness=self._view.randomness
            )
        )
