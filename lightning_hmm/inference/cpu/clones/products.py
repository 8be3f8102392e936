"""Products of up to four messages with a block of the transition matrix, given by the addresses of its rows."""

from __future__ import annotations

from lightning_hmm.inference.cpu.cache import inner
from lightning_hmm.inference.kernels.blocks import make_dots, make_update

GROUP = 4  # largest number of messages that are multiplied in one pass over the rows of a block

_update_41, _update_44 = make_update(4, 1), make_update(4, 4)
_update_21, _update_24 = make_update(2, 1), make_update(2, 4)
_update_11, _update_14 = make_update(1, 1), make_update(1, 4)
_dots_41, _dots_44 = make_dots(4, 1), make_dots(4, 4)
_dots_21, _dots_24 = make_dots(2, 1), make_dots(2, 4)
_dots_11, _dots_14 = make_dots(1, 1), make_dots(1, 4)


@inner
def add_rows(count, like, depth, width, outputs, factors, rows):
    """Computes C_r += sum over d < `depth` of x[d, r] Y_d, for r < `count`, which is four, two or one.

    Rows have `width` numbers of the type of `like`. `outputs` and `rows` contain the addresses of C_r and Y_d, and
    `factors` contains the numbers x.
    """
    size, fours = factors.itemsize, depth & ~3
    c, x, y = outputs.ctypes.data, factors.ctypes.data, rows.ctypes.data
    if count == 4:
        for d in range(0, fours, 4):
            _update_44(like, width, c, x + d * 4 * size, y + 8 * d)
        for d in range(fours, depth):
            _update_41(like, width, c, x + d * 4 * size, y + 8 * d)
    elif count == 2:
        for d in range(0, fours, 4):
            _update_24(like, width, c, x + d * 2 * size, y + 8 * d)
        for d in range(fours, depth):
            _update_21(like, width, c, x + d * 2 * size, y + 8 * d)
    else:
        for d in range(0, fours, 4):
            _update_14(like, width, c, x + d * size, y + 8 * d)
        for d in range(fours, depth):
            _update_11(like, width, c, x + d * size, y + 8 * d)


@inner
def dot_rows(count, like, depth, width, sources, products, rows):
    """Computes products[d, r] = C_r . Y_d, for d < `depth` and r < `count`, which is four, two or one.

    `sources` and `rows` contain the addresses of C_r and Y_d.
    """
    size, fours = products.itemsize, depth & ~3
    out, c, y = products.ctypes.data, sources.ctypes.data, rows.ctypes.data
    if count == 4:
        for d in range(0, fours, 4):
            _dots_44(like, width, out + d * 4 * size, c, y + 8 * d)
        for d in range(fours, depth):
            _dots_41(like, width, out + d * 4 * size, c, y + 8 * d)
    elif count == 2:
        for d in range(0, fours, 4):
            _dots_24(like, width, out + d * 2 * size, c, y + 8 * d)
        for d in range(fours, depth):
            _dots_21(like, width, out + d * 2 * size, c, y + 8 * d)
    else:
        for d in range(0, fours, 4):
            _dots_14(like, width, out + d * size, c, y + 8 * d)
        for d in range(fours, depth):
            _dots_11(like, width, out + d * size, c, y + 8 * d)
