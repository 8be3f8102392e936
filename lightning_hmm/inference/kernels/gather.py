"""SIMD intrinsics for products with sparse matrices, which are given as lists of weights and indices.

For one sequence, the lists of as many outputs as a vector has lanes are interleaved, so that a vector contains one
element of each list. For many sequences, messages are transposed, so that each state has one or two vectors of
sequences, and the sums of a list remain in registers. Operations on whole rows of one sequence are also defined here.

Elements are loaded one by one. The names of gather instructions differ between versions of LLVM, and on the machines
that were tried they were hardly faster.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lightning_hmm.inference.kernels.simd import VECTOR_BYTES, Emitter, make_row_operation

_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)


def vector_lanes(itemsize: int) -> int:
    """Returns how many numbers of `itemsize` bytes a vector contains."""
    return VECTOR_BYTES // itemsize


def _load_places(emit: Emitter, indices: ir.Value, source: ir.Value) -> ir.Value:
    """Loads a vector of ``source[indices[lane]]``, where `indices` is the address of int32 numbers."""
    builder = emit.builder
    index_vector = ir.VectorType(_INT32, emit.lanes)
    places = builder.load(builder.inttoptr(indices, index_vector.as_pointer()), align=4, typ=index_vector)
    found = ir.Constant(emit.vector, ir.Undefined)
    for lane in range(emit.lanes):
        place = builder.sext(builder.extract_element(places, ir.Constant(_INT32, lane)), _INT64)
        found = builder.insert_element(
            found, emit.load(emit.address(source, place), emit.scalar), ir.Constant(_INT32, lane)
        )
    return found


class _Loop:
    """A loop that runs `count` times, possibly zero, with pointers that advance and values that are carried over."""

    def __init__(
        self, builder: ir.IRBuilder, count: ir.Value, pointers: list[tuple[ir.Value, int]], carried: list[ir.Value]
    ) -> None:
        self.builder, self.count, self.carried_start = builder, count, carried
        self.before, self.body, self.after = (
            builder.block,
            builder.append_basic_block("walk"),
            builder.append_basic_block("walked"),
        )
        builder.cbranch(builder.icmp_signed("<=", count, ir.Constant(_INT64, 0)), self.after, self.body)
        builder.position_at_end(self.body)
        self.index = builder.phi(_INT64)
        self.pointers = [builder.phi(_INT64) for _ in pointers]
        self.carried = [builder.phi(value.type) for value in carried]
        self._steps = pointers

    def close(self, results: list[ir.Value]) -> list[ir.Value]:
        """Ends the body. Returns the carried values after the loop."""
        builder, body = self.builder, self.builder.block
        following = builder.add(self.index, ir.Constant(_INT64, 1))
        self.index.add_incoming(ir.Constant(_INT64, 0), self.before)
        self.index.add_incoming(following, body)
        for phi, (start, step) in zip(self.pointers, self._steps, strict=True):
            phi.add_incoming(start, self.before)
            phi.add_incoming(builder.add(phi, ir.Constant(_INT64, step)), body)
        for phi, start, result in zip(self.carried, self.carried_start, results, strict=True):
            phi.add_incoming(start, self.before)
            phi.add_incoming(result, body)
        builder.cbranch(builder.icmp_signed("<", following, self.count), self.body, self.after)
        builder.position_at_end(self.after)
        final = []
        for start, result in zip(self.carried_start, results, strict=True):
            phi = builder.phi(start.type)
            phi.add_incoming(start, self.before)
            phi.add_incoming(result, body)
            final.append(phi)
        return final


def _make_gather(max_plus: bool):
    @intrinsic
    def gather(typing_context, like, out, start, weights, indices, source, count):
        is_double = like == types.float64
        signature = types.void(like, types.intp, like, types.intp, types.intp, types.intp, types.intp)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, out, start, weights, indices, source, count = args
            loop = _Loop(
                builder, count, [(weights, emit.lanes * emit.size), (indices, 4 * emit.lanes)], [emit.splat(start)]
            )
            weight_at, index_at = loop.pointers
            weight, found, total = (
                emit.load(weight_at, emit.vector),
                _load_places(emit, index_at, source),
                loop.carried[0],
            )
            if max_plus:
                candidate = builder.fadd(weight, found)
                total = builder.select(builder.fcmp_ordered(">", candidate, total), candidate, total)
            else:
                total = emit.multiply_add(weight, found, total)
            emit.store(loop.close([total])[0], out)
            return context.get_dummy_value()

        return signature, codegen

    return gather


# gather_sum(like, out, start, weights, indices, source, count) computes out[lane] = start + sum over c < count of
# weights[c, lane] * source[indices[c, lane]]. Arrays are given by addresses. gather_max uses (max, +) in place of (+,
# x).
gather_sum = _make_gather(max_plus=False)
gather_max = _make_gather(max_plus=True)


@intrinsic
def gather_count(typing_context, like, out, plain, weights, indices, source, message, counts, count):
    """Computes weighted sums, plain sums and counts of g = source[indices[c, lane]]. Arrays are given by addresses.

    out[lane] = sum over c of weights[c, lane] * g, plain[lane] = sum over c of g, and counts[c, lane] += message[lane]
    * g.
    """
    is_double = like == types.float64
    signature = types.void(like, *[types.intp] * 8)

    def codegen(context, builder, signature, args):
        emit = Emitter(builder, is_double)
        _, out, plain, weights, indices, source, message, counts, count = args
        message_value, zero = emit.load(message, emit.vector), emit.constant(0.0)
        width = emit.lanes * emit.size
        loop = _Loop(builder, count, [(weights, width), (indices, 4 * emit.lanes), (counts, width)], [zero, zero])
        weight_at, index_at, count_at = loop.pointers
        found = _load_places(emit, index_at, source)
        emit.store(emit.multiply_add(message_value, found, emit.load(count_at, emit.vector)), count_at)
        totals = [
            emit.multiply_add(emit.load(weight_at, emit.vector), found, loop.carried[0]),
            builder.fadd(loop.carried[1], found),
        ]
        weighted, unweighted = loop.close(totals)
        emit.store(weighted, out)
        emit.store(unweighted, plain)
        return context.get_dummy_value()

    return signature, codegen


def _make_tile_column(vectors: int):
    @intrinsic
    def tile_column(typing_context, like, out, start, weights, indices, source, pairs):
        is_double = like == types.float64
        signature = types.void(like, *[types.intp] * 6)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, out, start, weights, indices, source, pairs = args
            places = [emit.word(v * emit.lanes) for v in range(vectors)]
            starts = [emit.load(emit.address(start, place), emit.vector) for place in places] + [
                emit.constant(0.0)
            ] * vectors
            loop = _Loop(builder, pairs, [(weights, 2 * emit.size), (indices, 8)], starts)
            weight_at, index_at = loop.pointers
            sums = list(loop.carried)
            for c in range(2):  # Two sums each, because an addition to one sum waits for the previous one.
                weight = emit.splat(emit.load(emit.address(weight_at, emit.word(c)), emit.scalar))
                address = builder.inttoptr(builder.add(index_at, emit.word(4 * c)), _INT32.as_pointer())
                row = builder.mul(
                    builder.sext(builder.load(address, align=4, typ=_INT32), _INT64), emit.word(vectors * emit.lanes)
                )
                for v, place in enumerate(places):
                    n = c * vectors + v
                    sums[n] = emit.multiply_add(
                        weight, emit.load(emit.address(source, row, place), emit.vector), sums[n]
                    )
            final = loop.close(sums)
            for v, place in enumerate(places):
                emit.store(builder.fadd(final[v], final[vectors + v]), emit.address(out, place))
            return context.get_dummy_value()

        return signature, codegen

    return tile_column


# tile_column_one(like, out, start, weights, indices, source, pairs) computes out = start + sum over c < 2 * pairs of
# weights[c] * source[indices[c]]. `out`, `start` and each row of `source` are one vector, or two in tile_column_two.
tile_column_one, tile_column_two = _make_tile_column(1), _make_tile_column(2)


@intrinsic
def transpose_block(typing_context, like, out, out_bytes, out_last, source, source_bytes, source_last):
    """Computes out[i, j] = source[j, i] for i and j below the number of lanes of a vector.

    Rows are `out_bytes` and `source_bytes` apart. Rows after the last one, number `out_last` or `source_last`, are
    replaced by the last one.
    """
    is_double = like == types.float64
    signature = types.void(like, *[types.intp] * 6)

    def codegen(context, builder, signature, args):
        emit = Emitter(builder, is_double)
        _, out, out_bytes, out_last, source, source_bytes, source_last = args

        def places(base, row_bytes, last):
            numbers = [
                builder.select(builder.icmp_signed("<", emit.word(n), last), emit.word(n), last)
                for n in range(emit.lanes)
            ]
            return [builder.add(base, builder.mul(number, row_bytes)) for number in numbers]

        rows = [emit.load(place, emit.vector) for place in places(source, source_bytes, source_last)]
        half = 1
        while half < emit.lanes:  # Exchanges this bit of the row number with that of the lane number.
            low = [k if not k & half else emit.lanes + k - half for k in range(emit.lanes)]
            high = [k + half if not k & half else emit.lanes + k for k in range(emit.lanes)]
            for n in range(emit.lanes):
                if not n & half:
                    rows[n], rows[n + half] = (
                        emit.pick(rows[n], rows[n + half], low),
                        emit.pick(rows[n], rows[n + half], high),
                    )
            half *= 2
        for row, place in zip(rows, places(out, out_bytes, out_last), strict=True):
            emit.store(row, place)
        return context.get_dummy_value()

    return signature, codegen


def _add(emit, vectors, scalars):
    return {}, emit.builder.fadd(vectors[0], vectors[1])


# largest_sum(like, length, row, other) returns the maximum of row + other. There must be no NaN.
largest_sum = make_row_operation(2, 0, _add, largest=True)
