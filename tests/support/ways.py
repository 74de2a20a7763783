"""How far rounding may lead two runs of one training apart."""


def assert_same_way(actual, expected, start, part=1e-4):
    """Assert that each tensor of weights went from `start` as expected: on average, to a part of its longest way.

    Not weight by weight. Adam and its like divide a gradient by its own size, so that one of no more than rounding
    takes a whole step either way. These are few: where rounding is r of a usual gradient, the mean of
    min(1, r / |gradient|) is about r log(1 / r), 2e-5 for r = 1e-6. A row of a hundred that misses one of ten steps is
    1e-3. Weights themselves are rounded too, by up to 2**-24 in each step.
    """
    for a, b, before in zip(actual, expected, start, strict=True):
        a, b, before = (x.detach().double() for x in (a, b, before))
        assert a.shape == b.shape == before.shape
        apart, way, size = float((a - b).abs().mean()), float((b - before).abs().max()), float(b.abs().mean())
        assert apart <= part * way + 2**-22 * size, f"{apart:.1e} apart, of a way of {way:.1e}"
