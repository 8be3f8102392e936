"""Vector instructions of the driver: a step of the filter, a step of smoothing, and rows of emission probabilities.

They work on several rows at once, so that no row waits for another, and take addresses, as those of `kernels.simd` do.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_hmm.inference.kernels.simd import Emitter, make_row_operation, multiply_block

_LONG = ir.IntType(64)


@intrinsic
def peek(typing_context, like, address):
    """The number of the type of `like` at an address."""

    def codegen(context, builder, signature, args):
        kind = context.get_data_type(signature.args[0])
        return builder.load(builder.inttoptr(args[1], kind.as_pointer()), align=1, typ=kind)

    return like(like, types.intp), codegen


def _any(builder, mask):
    """Whether a lane of a vector of booleans is true."""
    bits = ir.IntType(mask.type.count)
    return builder.icmp_unsigned("!=", builder.bitcast(mask, bits), ir.Constant(bits, 0))


def _false(emit):
    return ir.Constant(ir.VectorType(ir.IntType(1), emit.lanes), [0] * emit.lanes)


def _make_filter(rows: int, watch: bool):
    """Returns the intrinsics

        filter(like, length, messages, emissions, flush, tiny, collapse, scales, products)
        step(like, messages, before, transition, depth, emissions, flush, tiny, collapse, scales, products)

    For each of `rows` predicted messages: the message is multiplied by its emission row where it is above `tiny`, and
    set to zero elsewhere. It is then divided by its sum, and set to zero where it is below `flush`. The inverse of the
    sum is written to `scales`. If the sum is not above `collapse`, the inverse and the message are zero. `products`, in
    float64, are multiplied by the sums, or by zero if they collapsed. `emissions` contains addresses.

    Returns an integer. Bit 0: one of the products is zero or may soon leave the range of floats. Bit 1 + r: row r has
    lost an entry, which is zero although its prediction and its emission are not; only with `watch`.

    `step` is for rows of one vector: it predicts the messages itself, from those `before`, and keeps them in registers.
    """

    def normalize(emit, total, collapse, scales, products):
        builder, short, wide = emit.builder, emit.of(rows), emit.wide(rows)
        kept = builder.fcmp_ordered(">", total, short.splat(collapse))
        scale = builder.select(kept, builder.fdiv(short.constant(1.0), total), short.constant(0.0))
        short.store(scale, scales)
        total = total if emit.size == wide.size else builder.fpext(total, wide.vector)
        product = builder.select(kept, builder.fmul(wide.load(products, wide.vector), total), wide.constant(0.0))
        wide.store(product, products)
        leaving = builder.or_(
            builder.fcmp_ordered("<", product, wide.constant(1e-100)),
            builder.fcmp_ordered(">", product, wide.constant(1e100)),
        )
        return [emit.pick(scale, scale, [r] * emit.lanes) for r in range(rows)], _any(builder, leaving)

    def weigh(emit, message, emission, tiny):
        """The product, and where it is zero although both factors are not."""
        builder, zero = emit.builder, emit.constant(0.0)
        emission = emit.load(emission, emit.vector)
        joint = emit.keep_where(">", emission, tiny, builder.fmul(message, emission))
        if not watch:
            return joint, None
        both = builder.and_(builder.fcmp_ordered(">", message, zero), builder.fcmp_ordered(">", emission, zero))
        return joint, builder.and_(both, builder.fcmp_ordered("==", joint, zero))

    def rescale(emit, joint, factor, flush):
        """The quotient, and where it is zero although `joint` is not."""
        builder = emit.builder
        message = builder.fmul(joint, factor)
        kept = builder.fcmp_ordered(">=", message, flush)
        message = builder.select(kept, message, emit.constant(0.0))
        if not watch:
            return message, None
        return message, builder.and_(builder.not_(kept), builder.fcmp_ordered(">", joint, emit.constant(0.0)))

    def either(emit, left, right):
        return emit.builder.or_(left, right) if watch else None

    def report(emit, leaving, lost):
        """The integer that is returned; which rows have lost something is found out only if one has."""
        builder = emit.builder
        result = builder.zext(leaving, _LONG)
        if not watch:
            return result
        anywhere = lost[0]
        for mask in lost[1:]:
            anywhere = builder.or_(anywhere, mask)
        before, some, after = builder.block, builder.append_basic_block("lost"), builder.append_basic_block("reported")
        builder.cbranch(_any(builder, anywhere), some, after)
        builder.position_at_end(some)
        rows_lost = result
        for r, mask in enumerate(lost):
            rows_lost = builder.or_(
                rows_lost, builder.shl(builder.zext(_any(builder, mask), _LONG), ir.Constant(_LONG, 1 + r))
            )
        builder.branch(after)
        builder.position_at_end(after)
        phi = builder.phi(_LONG)
        phi.add_incoming(result, before)
        phi.add_incoming(rows_lost, some)
        return phi

    @intrinsic
    def filter_rows(typing_context, like, length, messages, emissions, flush, tiny, collapse, scales, products):
        is_double = like == types.float64
        scalar = types.float64 if is_double else types.float32
        signature = types.int64(like, *[types.intp] * 3, scalar, scalar, scalar, *[types.intp] * 2)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, length, messages, emissions, flush, tiny, collapse, scales, products = args
            flush, tiny = emit.splat(flush), emit.splat(tiny)
            message_at = [emit.address(messages, builder.mul(length, emit.word(r))) for r in range(rows)]
            emission_at = [emit.load_word(emissions, r) for r in range(rows)]

            def weigh_all(k, carried):
                totals, lost = list(carried[:rows]), list(carried[rows:]) or [None] * rows
                for r in range(rows):
                    place = emit.address(message_at[r], k)
                    joint, gone = weigh(emit, emit.load(place, emit.vector), emit.address(emission_at[r], k), tiny)
                    emit.store(joint, place)
                    totals[r], lost[r] = builder.fadd(totals[r], joint), either(emit, lost[r], gone)
                return totals + lost if watch else totals

            carried = emit.loop(length, [emit.constant(0.0)] * rows + [_false(emit)] * rows * watch, weigh_all)
            factors, leaving = normalize(emit, emit.sum_lanes(carried[:rows]), collapse, scales, products)

            def rescale_all(k, lost):
                lost = list(lost) or [None] * rows
                for r in range(rows):
                    place = emit.address(message_at[r], k)
                    message, gone = rescale(emit, emit.load(place, emit.vector), factors[r], flush)
                    emit.store(message, place)
                    lost[r] = either(emit, lost[r], gone)
                return lost if watch else []

            return report(emit, leaving, emit.loop(length, carried[rows:], rescale_all))

        return signature, codegen

    @intrinsic
    def step_rows(
        typing_context, like, messages, before, transition, depth, emissions, flush, tiny, collapse, scales, products
    ):
        is_double = like == types.float64
        scalar = types.float64 if is_double else types.float32
        signature = types.int64(like, *[types.intp] * 5, scalar, scalar, scalar, *[types.intp] * 2)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, messages, before, transition, depth, emissions, flush, tiny, collapse, scales, products = args
            flush, tiny, width = emit.splat(flush), emit.splat(tiny), emit.word(emit.lanes)
            start = {(r, 0): emit.constant(0.0) for r in range(rows)}
            predicted = multiply_block(emit, rows, 1, start, before, width, emit.word(1), transition, width, depth)
            joints, first = zip(
                *[weigh(emit, predicted[r, 0], emit.load_word(emissions, r), tiny) for r in range(rows)], strict=True
            )
            factors, leaving = normalize(emit, emit.sum_lanes(list(joints)), collapse, scales, products)
            lost = []
            for r in range(rows):
                message, second = rescale(emit, joints[r], factors[r], flush)
                emit.store(message, emit.address(messages, emit.word(r * emit.lanes)))
                lost.append(either(emit, first[r], second))
            return report(emit, leaving, lost)

        return signature, codegen

    return filter_rows, step_rows


(filter_four, step_four), (filter_one, _) = _make_filter(4, False), _make_filter(1, False)
(watched_filter_four, watched_step_four), (watched_filter_one, _) = _make_filter(4, True), _make_filter(1, True)


def _multiply(emit, vectors, scalars):
    return {0: emit.builder.fmul(vectors[1], vectors[2])}, None


# multiply_row(like, length, out, left, right): out = left * right
multiply_row = make_row_operation(3, 0, _multiply)


@intrinsic
def center_row(typing_context, like, length, out, source, center):
    """out = source - center in float64, for a `source` of the type of `like`; arrays are addresses."""
    is_double = like == types.float64
    signature = types.void(like, *[types.intp] * 4)

    def codegen(context, builder, signature, args):
        wide = Emitter(builder, True)
        emit = wide if is_double else Emitter(builder, False, wide.lanes)
        _, length, out, source, center = args

        def subtract(k, _):
            values = emit.load(emit.address(source, k), emit.vector)
            values = values if is_double else builder.fpext(values, wide.vector)
            wide.store(builder.fsub(values, wide.load(wide.address(center, k), wide.vector)), wide.address(out, k))
            return []

        wide.loop(length, [], subtract)
        return context.get_dummy_value()

    return signature, codegen


def _make_posterior(rows: int):
    """Returns the intrinsic ``posterior(like, length, kappas, gammas, alphas, betas, scales, emissions)``.

    For each of `rows` messages: kappa = beta * emission row * scale where alpha > 0, and 0 elsewhere; and gamma = alpha
    * beta. `emissions` contains addresses.
    """

    @intrinsic
    def posterior_rows(typing_context, like, length, kappas, gammas, alphas, betas, scales, emissions):
        is_double = like == types.float64
        signature = types.void(like, *[types.intp] * 7)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, length, kappas, gammas, alphas, betas, scales, emissions = args
            apart = [builder.mul(length, emit.word(r)) for r in range(rows)]
            emission_at = [emit.load_word(emissions, r) for r in range(rows)]
            factors = [emit.splat(emit.load(emit.address(scales, emit.word(r)), emit.scalar)) for r in range(rows)]

            def smooth(k, _):
                for r in range(rows):
                    alpha, beta = (emit.load(emit.address(base, apart[r], k), emit.vector) for base in (alphas, betas))
                    beta = emit.keep_where(">", alpha, emit.constant(0.0), beta)
                    weighed = builder.fmul(beta, emit.load(emit.address(emission_at[r], k), emit.vector))
                    emit.store(builder.fmul(weighed, factors[r]), emit.address(kappas, apart[r], k))
                    emit.store(builder.fmul(alpha, beta), emit.address(gammas, apart[r], k))
                return []

            emit.loop(length, [], smooth)
            return context.get_dummy_value()

        return signature, codegen

    return posterior_rows


posterior_four, posterior_one = _make_posterior(4), _make_posterior(1)

# e^r = 1 + r + r^2 p(r) for |r| <= log(2) / 2, where p interpolates at Chebyshev points. The relative errors of the
# polynomials are 2e-17 and 1e-8.
_DOUBLE_SERIES = (
    1.0, 1.0, 0.5000000000000001, 0.16666666666666669, 0.04166666666662413, 0.008333333333330062,
    0.0013888888917213717, 0.00019841269863053618, 2.4801521295954376e-05, 2.7557268459997064e-06,
    2.7620088445409746e-07, 2.510038549551032e-08,
)  # fmt: skip
_SINGLE_SERIES = (1.0, 1.0, 0.5, 0.16666576989698775, 0.041666554617204574, 0.008363179052722578, 0.0013926183587713494)


def _exponential(emit, x):
    """2^n e^r with n the nearest whole number to x / log 2. The result must be a normal number."""
    builder, is_double = emit.builder, emit.size == 8
    mantissa, series = (52, _DOUBLE_SERIES) if is_double else (23, _SINGLE_SERIES)
    # log 2 in two parts, the first with so few digits that its product with n is exact.
    high, low = (
        (6.93147180369123816490e-01, 1.90821492927058770002e-10)
        if is_double
        else (0.693145751953125, 1.428606765330187e-06)
    )
    whole = ir.VectorType(ir.IntType(8 * emit.size), emit.lanes)
    magic = 1.5 * 2.0**mantissa  # added to a number, it leaves the nearest whole number in the lowest bits
    shifted = emit.multiply_add(x, emit.constant(1.0 / math.log(2.0)), emit.constant(magic))
    # The flag replaces those of `fastmath`, with which LLVM could cancel the number if there is no fused multiply-add.
    n = builder.fsub(shifted, emit.constant(magic), flags=("contract",))
    r = emit.multiply_add(n, emit.constant(-high), x)
    r = emit.multiply_add(n, emit.constant(-low), r)
    value = emit.constant(series[-1])
    for coefficient in series[-2::-1]:
        value = emit.multiply_add(value, r, emit.constant(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, whole), ir.Constant(whole, [mantissa] * emit.lanes))
    return builder.bitcast(builder.add(builder.bitcast(value, whole), exponent), emit.vector)


def _make_relative(rows: int):
    """Returns the intrinsic ``relative(like, length, logs, out, largest)``.

    For each of `rows` rows of float64 `logs`, one after the other: out = exp(logs - largest), in the type of `like`,
    where `largest` is the largest of the row, at least -1e308. What is too small for that type becomes a number above
    zero that is at most `Range.tiny`; exp(-inf) is zero.
    """

    @intrinsic
    def relative_rows(typing_context, like, length, logs, out, largest):
        is_double = like == types.float64
        signature = types.void(like, *[types.intp] * 4)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            wide = emit.wide(emit.lanes)
            _, length, logs, out, largest = args
            apart = [builder.mul(length, emit.word(r)) for r in range(rows)]
            lowest = emit.constant(
                -708.39 if is_double else -87.33
            )  # the exponential is between the smallest normal number and `tiny`

            def log_at(r, k):
                return wide.load(wide.address(logs, apart[r], k), wide.vector)

            tops = emit.loop(
                length,
                [wide.constant(-1e308)] * rows,
                lambda k, tops: [wide.larger(log_at(r, k), tops[r]) for r in range(rows)],
            )
            tops = [wide.max_vector(top) for top in tops]
            for r, top in enumerate(tops):
                builder.store(
                    top, builder.inttoptr(wide.address(largest, emit.word(r)), ir.DoubleType().as_pointer()), align=8
                )
            tops = [wide.splat(top) for top in tops]

            def exponentials(k, _):
                for r in range(rows):
                    x = builder.fsub(log_at(r, k), tops[r])
                    possible = builder.fcmp_ordered(">", x, wide.constant(float("-inf")))
                    x = x if is_double else builder.fptrunc(x, emit.vector)
                    value = _exponential(emit, emit.larger(x, lowest))
                    emit.store(builder.select(possible, value, emit.constant(0.0)), emit.address(out, apart[r], k))
                return []

            emit.loop(length, [], exponentials)
            return context.get_dummy_value()

        return signature, codegen

    return relative_rows


relative_four, relative_one = _make_relative(4), _make_relative(1)
