"""`TrustRegion`: holds each step of an LM head to a limit of its diameter."""

from __future__ import annotations

from .region import Region


class TrustRegion(Region):
    """Holds each step of an LM head to a limit of its diameter D(S), and leaves out steps that are not finite.

    After ``optimizer.step()``, and before anything sees the weights, U' = (1 - lr decay) U + S becomes
    (1 - lr decay) U + S_held with D(S_held) <= limit. A step whose centred rows are all in the ball of radius limit / 2
    is left to the bit. Weight decay and the backbone are outside: what they do to the log-odds is not held.

    Example:
        ::

            with TrustRegion(limit=0.02).watch(model, optimizer) as region:
                for batch in batches:
                    ...
                    optimizer.step()
                    print(region.last.held, region.last.asked_upper, region.last.tokens)

    `last` is a frozen `RegionStep`: step (from 1), limit, asked_lower and asked_upper (bounds of the diameter that the
    optimizer made), made_upper, held and rows (how many rows were held, of how many), tokens (those held most), and
    left_out. `clipped` and `left_out` count steps. The padding of a head is held with it, and a bias that is trained
    extends the rows, as it does in the records of `HilbertMonitor`.

    Args:
        limit: largest D(S) that a step may have, or a function of the step's number, from 1. Infinity holds nothing.
        how: "rows" projects the centred rows of S onto the ball of radius limit / 2; "scale" scales all of S by
            limit / D(S), which takes a search for D(S) in every step.
        head: the LM head, its name or that of its weight; by default it is looked for.
        decay: how an optimizer that is not known uses weight_decay.
        logit_scale: factor between the head's output and the logits; by default that of the model's config, or 1.
        stop_after: steps in a row with gradients that are not finite, after which NonFiniteGradients is raised.
    """
