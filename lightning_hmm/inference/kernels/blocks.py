"""SIMD intrinsics for products with blocks of a matrix, which are given by the addresses of rows of any length.

For blocks whose rows fit in registers, a message is multiplied, summed and normalized by one intrinsic.
"""

from __future__ import annotations

import functools

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lightning_hmm.inference.kernels.simd import Emitter


@intrinsic
def prefetch(typing_context, address):
    """Prefetches the cache line at `address`, which may be invalid."""

    def codegen(context, builder, signature, args):
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(
            function,
            [builder.inttoptr(args[0], pointer), ir.Constant(word, 0), ir.Constant(word, 3), ir.Constant(word, 1)],
        )
        return context.get_dummy_value()

    return types.void(types.intp), codegen


def make_message(vectors: int):
    """Returns the intrinsic ``message(like, c, x, y, depth, flush)``, which computes c = x @ Y, divided by its sum.

    The intrinsic returns the sum. Entries below `flush` are set to 0. The rows of Y are contiguous and `vectors`
    vectors wide. Each sum over rows is divided into four or two independent parts, so up to four rows are read at once:
    x must be 0 after `depth`, and Y must be readable.
    """
    parts = 4 if vectors <= 2 else 2  # limited by the number of registers

    @intrinsic
    def message(typing_context, like, c, x, y, depth, flush):
        is_double = like == types.float64
        scalar = types.float64 if is_double else types.float32
        signature = scalar(like, *[types.intp] * 4, scalar)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, c, x, y, depth, flush = args
            places = [(part, v) for part in range(parts) for v in range(vectors)]
            before, loop, after = (
                builder.block,
                builder.append_basic_block("rows"),
                builder.append_basic_block("rows_done"),
            )
            builder.branch(loop)
            builder.position_at_end(loop)
            k, totals = builder.phi(ir.IntType(64)), {place: builder.phi(emit.vector) for place in places}
            row = builder.mul(k, emit.word(vectors * emit.lanes))
            x_values = [
                emit.splat(emit.load(emit.address(x, builder.add(k, emit.word(part))), emit.scalar))
                for part in range(parts)
            ]
            sums = {}
            for part, v in places:
                y_value = emit.load(emit.address(y, row, emit.word((part * vectors + v) * emit.lanes)), emit.vector)
                sums[part, v] = emit.multiply_add(x_values[part], y_value, totals[part, v])
            k_next = builder.add(k, emit.word(parts))
            for phi, first, following in [
                (k, emit.word(0), k_next),
                *((totals[place], emit.constant(0.0), sums[place]) for place in places),
            ]:
                phi.add_incoming(first, before)
                phi.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", k_next, depth), loop, after)
            builder.position_at_end(after)
            products = [
                functools.reduce(builder.fadd, [sums[part, v] for part in range(parts)]) for v in range(vectors)
            ]
            total = emit.sum_vector(functools.reduce(builder.fadd, products))
            scale, flush = emit.splat(builder.fdiv(ir.Constant(emit.scalar, 1.0), total)), emit.splat(flush)
            for v, product in enumerate(products):
                scaled = builder.fmul(product, scale)
                emit.store(emit.keep_where(">=", scaled, flush, scaled), emit.address(c, emit.word(v * emit.lanes)))
            return total

        return signature, codegen

    return message


def _masked(emit: Emitter, address: ir.Value, mask: ir.Value, value: ir.Value | None = None) -> ir.Value | None:
    """Loads the numbers at `address` where `mask` is set, and zeros elsewhere.

    With `value`, stores it where it is set.
    """
    pointer = emit.builder.inttoptr(address, emit.vector.as_pointer())
    # Before LLVM 22, the alignment is an argument after the pointer.
    place = [pointer] if llvm.llvm_version_info[0] >= 22 else [pointer, ir.Constant(ir.IntType(32), emit.size)]
    action, result, arguments = "load", emit.vector, [*place, mask, emit.constant(0.0)]
    if value is not None:
        action, result, arguments = "store", ir.VoidType(), [value, *place, mask]
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    name = f"llvm.masked.{action}.v{emit.lanes}f{8 * emit.size}.p0"
    return emit.builder.call(cgutils.get_or_insert_function(emit.builder.module, function_type, name), arguments)


def _over_vectors(emit: Emitter, length: ir.Value, carried: list[ir.Value], body) -> list[ir.Value]:
    """Runs ``body(offset, mask, carried) -> carried`` for each whole vector, with `mask` None, and once for the
    remainder.
    """
    builder = emit.builder
    whole = builder.and_(length, emit.word(-emit.lanes))
    before, loop, between = (
        builder.block,
        builder.append_basic_block("vectors"),
        builder.append_basic_block("rest_or_not"),
    )
    rest, after = builder.append_basic_block("rest"), builder.append_basic_block("vectors_done")
    builder.cbranch(builder.icmp_signed(">", whole, emit.word(0)), loop, between)
    builder.position_at_end(loop)
    offset, in_loop = builder.phi(ir.IntType(64)), [builder.phi(value.type) for value in carried]
    following = body(offset, None, in_loop)
    offset_next = builder.add(offset, emit.word(emit.lanes))
    for phi, first, later in [(offset, emit.word(0), offset_next), *zip(in_loop, carried, following, strict=True)]:
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", offset_next, whole), loop, between)

    builder.position_at_end(between)
    so_far = [builder.phi(value.type) for value in carried]
    for phi, first, later in zip(so_far, carried, following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", whole, length), rest, after)

    builder.position_at_end(rest)
    words = ir.VectorType(ir.IntType(64), emit.lanes)
    left = builder.insert_element(
        ir.Constant(words, ir.Undefined), builder.sub(length, whole), ir.Constant(ir.IntType(32), 0)
    )
    left = builder.shuffle_vector(
        left, ir.Constant(words, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), emit.lanes), [0] * emit.lanes)
    )
    mask = builder.icmp_signed("<", ir.Constant(words, list(range(emit.lanes))), left)
    at_end = body(whole, mask, so_far)
    builder.branch(after)

    builder.position_at_end(after)
    results = [builder.phi(value.type) for value in carried]
    for phi, first, later in zip(results, so_far, at_end, strict=True):
        phi.add_incoming(first, between)
        phi.add_incoming(later, rest)
    return results


def _addresses(emit: Emitter, array: ir.Value, count: int) -> list[ir.Value]:
    return [emit.load(emit.builder.add(array, emit.word(8 * n)), ir.IntType(64)) for n in range(count)]


def make_update(rows: int, depth: int):
    """Returns the intrinsic ``update(like, length, c, x, y)``, which computes C_r += sum over d of x[d, r] Y_d.

    `c` and `y` are addresses of arrays with the addresses of the `rows` rows C_r and of the `depth` rows Y_d. `x` is
    the address of depth x rows numbers. Rows can have any length.
    """

    @intrinsic
    def update(typing_context, like, length, c, x, y):
        is_double = like == types.float64
        signature = types.void(like, *[types.intp] * 4)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, length, c, x, y = args
            c_at, y_at = _addresses(emit, c, rows), _addresses(emit, y, depth)
            factors = [
                [emit.splat(emit.load(emit.address(x, emit.word(d * rows + r)), emit.scalar)) for r in range(rows)]
                for d in range(depth)
            ]

            def body(offset, mask, carried):
                load = (lambda at: emit.load(at, emit.vector)) if mask is None else (lambda at: _masked(emit, at, mask))
                ys = [load(emit.address(at, offset)) for at in y_at]
                for r in range(rows):
                    place = emit.address(c_at[r], offset)
                    total = load(place)
                    for d in range(depth):
                        total = emit.multiply_add(factors[d][r], ys[d], total)
                    if mask is None:
                        emit.store(total, place)
                    else:
                        _masked(emit, place, mask, total)
                return []

            _over_vectors(emit, length, [], body)
            return context.get_dummy_value()

        return signature, codegen

    return update


def make_dots(rows: int, depth: int):
    """Returns the intrinsic ``dots(like, length, out, c, y)``, which computes out[d, r] = C_r . Y_d.

    Addresses are as for `make_update`.
    """

    @intrinsic
    def dots(typing_context, like, length, out, c, y):
        is_double = like == types.float64
        signature = types.void(like, *[types.intp] * 4)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, length, out, c, y = args
            c_at, y_at = _addresses(emit, c, rows), _addresses(emit, y, depth)

            def body(offset, mask, totals):
                load = (lambda at: emit.load(at, emit.vector)) if mask is None else (lambda at: _masked(emit, at, mask))
                cs, ys = (
                    [load(emit.address(at, offset)) for at in c_at],
                    [load(emit.address(at, offset)) for at in y_at],
                )
                return [
                    emit.multiply_add(cs[r], ys[d], totals[d * rows + r]) for d in range(depth) for r in range(rows)
                ]

            totals = _over_vectors(emit, length, [emit.constant(0.0)] * (rows * depth), body)
            for n, total in enumerate(totals):
                place = builder.inttoptr(emit.address(out, emit.word(n)), emit.scalar.as_pointer())
                builder.store(emit.sum_vector(total), place, align=emit.size)
            return context.get_dummy_value()

        return signature, codegen

    return dots
