"""SIMD intrinsics for numba: a small matrix product and some row operations.

An E-step mostly consists of products of small matrices, of a tile of messages and the transition matrix. ``np.dot`` in
numba uses a second BLAS with its own threads, and LLVM does not keep the accumulators of a plain loop in registers. The
innermost block is therefore emitted here as LLVM vectors: `rows` x `vectors` accumulators remain in registers while the
loop runs over the inner dimension. The same block with (max, +) in place of (+, x) is a step of the Viterbi algorithm.
It is addressed by element strides, so that the same block computes ``X @ Y`` and ``X.T @ Y``.

The other intrinsics are operations on rows of a few dozen numbers. The vector loops of LLVM take more time to check
that arrays do not overlap than for the arithmetic. For five states, the row operations below made an E-step twice as
fast.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core import config as numba_config
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# For each value of LIGHTNING_HMM_SIMD: the required features of the processor, and the name and features of the
# processor that numba compiles for. AVX-512 code is compiled for the present processor, as without the variable. The
# features of AVX2 are those of the level x86-64-v3.
_AVX2_FEATURES = ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_INSTRUCTION_SETS: dict[str, tuple[tuple[str, ...], str | None, str | None]] = {
    "avx512": (("avx512f",), None, None),
    "avx2": (_AVX2_FEATURES, "x86-64-v3", ",".join(f"+{feature}" for feature in _AVX2_FEATURES)),
    "generic": ((), "generic", ""),
}


def _forced_target(name: str, host: Mapping[str, bool]) -> tuple[str | None, str | None]:
    """Returns the processor name and the features that numba must compile for, or None for those of the host.

    Args:
        name: Value of LIGHTNING_HMM_SIMD.
        host: Features of the host.
    """
    if name not in _INSTRUCTION_SETS:
        *others, last = _INSTRUCTION_SETS
        raise ValueError(f"`LIGHTNING_HMM_SIMD` must be {', '.join(others)} or {last}, but is {name!r} instead.")
    required, cpu_name, features = _INSTRUCTION_SETS[name]
    lacking = [feature for feature in required if not host.get(feature)]
    if lacking:
        raise ValueError(
            f"`LIGHTNING_HMM_SIMD` must name instructions that the processor has, but is {name!r}, "
            f"and this processor lacks {', '.join(lacking)}. Use 'generic', or unset the variable."
        )
    return cpu_name, features


def _target_features() -> str:
    """Restricts numba to the instructions of LIGHTNING_HMM_SIMD if it is set. Returns the features for compilation."""
    forced = os.environ.get("LIGHTNING_HMM_SIMD")
    if forced:
        cpu_name, wanted = _forced_target(forced, llvm.get_host_cpu_features())
        vars(numba_config).update(CPU_NAME=cpu_name, CPU_FEATURES=wanted)
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]  # numba sets this once per process.
    if forced and features != (get_host_cpu_features() if wanted is None else wanted):
        raise RuntimeError(
            f"`LIGHTNING_HMM_SIMD` is {forced!r}, but numba was set up for other instructions "
            "before lightning_hmm was imported. Import lightning_hmm first."
        )
    return features


# The features are part of the key of numba's cache. The constants below depend on the features only, so code with other
# constants is never loaded.
_HAS_AVX512 = "+avx512f" in _target_features().split(",")
VECTOR_BYTES = 64 if _HAS_AVX512 else 32
# The largest block whose accumulators fit in the registers has 4 x 4 of 32 with AVX-512, and 4 x 2 of 16 otherwise.
_WIDEST = 4 if _HAS_AVX512 else 2


def padded_size(size: int, itemsize: int) -> int:
    """Returns the smallest multiple of the vector width that is at least `size`, for numbers of `itemsize` bytes."""
    lanes = VECTOR_BYTES // itemsize
    return -(-size // lanes) * lanes


@intrinsic
def lanes_of(typing_context, like):
    """Returns how many numbers of the type of `like` a vector contains."""

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.IntType(64), VECTOR_BYTES // (8 if like == types.float64 else 4))

    return types.intp(like), codegen


class Emitter:
    """Emits vector code for one data type into the function that numba is compiling."""

    def __init__(self, builder: ir.IRBuilder, is_double: bool, lanes: int | None = None) -> None:
        self.builder = builder
        self.size = 8 if is_double else 4
        self.lanes = lanes or VECTOR_BYTES // self.size
        self.scalar = ir.DoubleType() if is_double else ir.FloatType()
        self.vector = ir.VectorType(self.scalar, self.lanes)

    @staticmethod
    def word(value: int) -> ir.Constant:
        return ir.Constant(ir.IntType(64), value)

    def constant(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [value] * self.lanes)

    def address(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        """Returns `base` plus `offsets` elements."""
        for offset in offsets:
            base = self.builder.add(base, self.builder.mul(offset, self.word(self.size)))
        return base

    def load(self, address: ir.Value, value_type: ir.Type) -> ir.Value:
        pointer = self.builder.inttoptr(address, value_type.as_pointer())
        return self.builder.load(pointer, align=self.size, typ=value_type)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.builder.store(value, self.builder.inttoptr(address, self.vector.as_pointer()), align=self.size)

    def splat(self, value: ir.Value) -> ir.Value:
        undefined = ir.Constant(self.vector, ir.Undefined)
        single = self.builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(single, undefined, mask)

    def load_word(self, base: ir.Value, index: int) -> ir.Value:
        """Loads entry `index` of the int64 array at `base`."""
        pointer = self.builder.inttoptr(self.builder.add(base, self.word(8 * index)), ir.IntType(64).as_pointer())
        return self.builder.load(pointer, align=8, typ=ir.IntType(64))

    def of(self, lanes: int) -> Emitter:
        """Returns an emitter for vectors of `lanes` numbers of the same data type."""
        return Emitter(self.builder, self.size == 8, lanes)

    def wide(self, lanes: int) -> Emitter:
        """Returns an emitter for vectors of `lanes` float64 numbers."""
        return Emitter(self.builder, True, lanes)

    def add_scaled(self, source: Emitter, place: ir.Value, values: ir.Value, factor: ir.Value | None) -> None:
        """Adds `values` of the emitter `source`, times `factor` if given, to the numbers at `place`."""
        values = self.builder.fpext(values, self.vector) if source.size < self.size else values
        total = self.load(place, self.vector)
        self.store(
            self.builder.fadd(total, values) if factor is None else self.multiply_add(factor, values, total), place
        )

    def multiply_add(self, left: ir.Value, right: ir.Value, total: ir.Value) -> ir.Value:
        name = f"llvm.fmuladd.v{self.lanes}f{8 * self.size}"
        function_type = ir.FunctionType(self.vector, [self.vector] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, [left, right, total])

    def keep_where(self, comparison: str, left: ir.Value, right: ir.Value, value: ir.Value) -> ir.Value:
        """Returns `value` where ``left comparison right`` holds, and zero elsewhere."""
        return self.builder.select(self.builder.fcmp_ordered(comparison, left, right), value, self.constant(0.0))

    def loop(
        self, length: ir.Value, totals: list[ir.Value], body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]
    ) -> list[ir.Value]:
        """Runs ``totals = body(k, totals)`` for k = 0, one vector, two vectors, ... below `length`, at least once."""
        builder = self.builder
        before, loop, after = (
            builder.block,
            builder.append_basic_block("vectors"),
            builder.append_basic_block("vectors_done"),
        )
        builder.branch(loop)
        builder.position_at_end(loop)
        k, running = builder.phi(ir.IntType(64)), [builder.phi(total.type) for total in totals]
        new = body(k, running)
        k_next = builder.add(k, self.word(self.lanes))
        for phi, first, following in zip([k, *running], [self.word(0), *totals], [k_next, *new], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", k_next, length), loop, after)
        builder.position_at_end(after)
        return new

    def pick(self, left: ir.Value, right: ir.Value, lanes: list[int]) -> ir.Value:
        """Returns a vector of the given lanes of both. Lanes of `right` are numbered after those of `left`."""
        return self.builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))

    def sum_vector(self, vector: ir.Value) -> ir.Value:
        """Returns the sum of the lanes as a scalar."""
        name = f"llvm.vector.reduce.fadd.v{self.lanes}f{8 * self.size}"
        reduce = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(self.scalar, [self.scalar, self.vector]), name
        )
        return self.builder.call(reduce, [ir.Constant(self.scalar, 0.0), vector], fastmath=("reassoc",))

    def larger(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Returns the larger number of each pair. There must be no NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", left, right), left, right)

    def max_vector(self, vector: ir.Value) -> ir.Value:
        """Returns the largest lane as a scalar."""
        lanes = self.lanes
        while lanes > 1:
            lanes //= 2
            vector = self.larger(
                self.pick(vector, vector, list(range(lanes))), self.pick(vector, vector, list(range(lanes, 2 * lanes)))
            )
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    def sum_lanes(self, rows: list[ir.Value]) -> ir.Value:
        """Returns the sums of one or four vectors as a vector of one or four lanes.

        Four vectors are interleaved and added in a tree, which takes a quarter of the additions.
        """
        if len(rows) == 1:
            single = ir.Constant(ir.VectorType(self.scalar, 1), ir.Undefined)
            return self.builder.insert_element(single, self.sum_vector(rows[0]), ir.Constant(ir.IntType(32), 0))
        block = 1
        while len(rows) > 1:  # A row has one lane of each block. Shuffles within 16 bytes are fastest.
            group = max(2 * block, 16 // self.size)
            lower = [k for k in range(self.lanes) if k % group < group // 2]
            blocks = [lower[i : i + block] for i in range(0, len(lower), block)]
            low = [k for lanes in blocks for k in [*lanes, *(lane + self.lanes for lane in lanes)]]
            high = [k + group // 2 for k in low]
            rows = [
                self.builder.fadd(self.pick(*pair, low), self.pick(*pair, high))
                for pair in zip(rows[::2], rows[1::2], strict=True)
            ]
            block *= 2
        (total,), lanes = rows, self.lanes
        while lanes > block:
            lanes //= 2
            total = self.builder.fadd(
                self.pick(total, total, list(range(lanes))), self.pick(total, total, list(range(lanes, 2 * lanes)))
            )
        return total


def make_row_operation(num_arrays: int, num_scalars: int, body, *, sums: bool = False, largest: bool = False):
    """Returns the intrinsic ``row(like, length, *addresses, *scalars)``, which runs `body` on the vectors of the
    arrays.

    ``body(emit, vectors, scalars)`` returns a dict {array index: vector to store} and a vector. The intrinsic returns
    the sum of the latter with `sums`, and its maximum with `largest`. `length` must be a multiple of the vector width.
    """

    @intrinsic
    def row(typing_context, like, length, *arguments):
        is_double = like == types.float64
        scalar_type = types.float64 if is_double else types.float32
        result = scalar_type if sums or largest else types.void
        argument_types = [types.intp] * num_arrays + [scalar_type] * num_scalars
        signature = result(like, types.intp, types.StarArgTuple(tuple(argument_types)))

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            length = args[1]
            given = cgutils.unpack_tuple(builder, args[2], num_arrays + num_scalars)
            addresses, scalars = given[:num_arrays], [emit.splat(value) for value in given[num_arrays:]]

            def body_at(k, totals):
                places = [emit.address(address, k) for address in addresses]
                stores, term = body(emit, [emit.load(place, emit.vector) for place in places], scalars)
                for index, value in stores.items():
                    emit.store(value, places[index])
                if largest:
                    return [emit.larger(term, totals[0])]
                return [builder.fadd(totals[0], term)] if sums else []

            start = [emit.constant(-math.inf)] if largest else [emit.constant(0.0)] if sums else []
            totals = emit.loop(length, start, body_at)
            if largest:
                return emit.max_vector(totals[0])
            return emit.sum_vector(totals[0]) if sums else context.get_dummy_value()

        return signature, codegen

    return row


def _smooth(emit, vectors, scalars):
    back = emit.keep_where(">", vectors[0], emit.constant(0.0), vectors[1])
    gamma = emit.builder.fmul(vectors[0], back)
    return {1: back, 2: gamma}, gamma


@intrinsic
def accumulate_row(typing_context, like, length, total, row, weight):
    """Computes total += weight * row, where `total` and `weight` are float64, and `row` is float32 or float64."""
    is_double = like == types.float64
    signature = types.void(like, types.intp, types.intp, types.intp, types.float64)

    def codegen(context, builder, signature, args):
        emit = Emitter(builder, is_double)
        wide = emit.wide(emit.lanes)
        _, length, total, row, weight = args
        factor = wide.splat(weight)

        def add(k, _):
            wide.add_scaled(emit, wide.address(total, k), emit.load(emit.address(row, k), emit.vector), factor)
            return []

        emit.loop(length, [], add)
        return context.get_dummy_value()

    return signature, codegen


def _scale(emit, vectors, scalars):
    return {0: emit.builder.fmul(vectors[0], scalars[0])}, None


# smooth_row(like, length, alpha, beta, gamma) sets beta = 0 where alpha = 0 and gamma = alpha * beta. It returns the
# sum of gamma.
smooth_row = make_row_operation(3, 0, _smooth, sums=True)
# scale_row(like, length, row, scale) computes row *= scale.
scale_row = make_row_operation(1, 1, _scale)


def multiply_block(emit, rows, vectors, start, x, x_row, x_col, y, y_row, depth, *, max_plus=False):
    """Emits the inner loop of a product for `rows` x `vectors` accumulators with values `start`. Returns them."""
    builder = emit.builder
    places = [(r, v) for r in range(rows) for v in range(vectors)]
    before, loop, after = builder.block, builder.append_basic_block("inner"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<=", depth, emit.word(0)), after, loop)
    builder.position_at_end(loop)
    k, x_k, y_k = (builder.phi(ir.IntType(64)) for _ in range(3))
    totals = {place: builder.phi(emit.vector) for place in places}
    y_values = [emit.load(emit.address(y_k, emit.word(v * emit.lanes)), emit.vector) for v in range(vectors)]
    sums = {}
    for r in range(rows):
        x_value = emit.splat(emit.load(emit.address(x_k, builder.mul(x_row, emit.word(r))), emit.scalar))
        for v in range(vectors):
            if max_plus:
                candidate = builder.fadd(x_value, y_values[v])
                larger = builder.fcmp_ordered(">", candidate, totals[r, v])
                sums[r, v] = builder.select(larger, candidate, totals[r, v])
            else:
                sums[r, v] = emit.multiply_add(x_value, y_values[v], totals[r, v])
    k_next = builder.add(k, emit.word(1))
    steps = [(k, emit.word(0), k_next), (x_k, x, emit.address(x_k, x_col)), (y_k, y, emit.address(y_k, y_row))]
    for phi, first, following in steps + [(totals[place], start[place], sums[place]) for place in places]:
        phi.add_incoming(first, before)
        phi.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", k_next, depth), loop, after)
    builder.position_at_end(after)
    results = {place: builder.phi(emit.vector) for place in places}
    for place in places:
        results[place].add_incoming(start[place], before)
        results[place].add_incoming(sums[place], loop)
    return results


def _make_smooth(rows: int):
    """Returns the intrinsic ``smooth(like, length, kappas, alphas, betas, scales, emissions, counts)``.

    For each of `rows` messages, kappa = beta * emission row * scale where alpha > 0, and 0 elsewhere. In addition,
    alpha * beta is added to the float64 row of `counts`. `emissions` and `counts` contain addresses.
    """

    @intrinsic
    def smooth_rows(typing_context, like, length, kappas, alphas, betas, scales, emissions, counts):
        is_double = like == types.float64
        signature = types.void(like, *[types.intp] * 7)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, length, kappas, alphas, betas, scales, emissions, counts = args
            wide = emit.wide(emit.lanes)
            apart = [builder.mul(length, emit.word(r)) for r in range(rows)]
            emission_at, count_at = ([emit.load_word(table, r) for r in range(rows)] for table in (emissions, counts))
            factors = [emit.splat(emit.load(emit.address(scales, emit.word(r)), emit.scalar)) for r in range(rows)]

            def smooth(k, _):
                for r in range(rows):
                    alpha, beta = (emit.load(emit.address(base, apart[r], k), emit.vector) for base in (alphas, betas))
                    beta = emit.keep_where(">", alpha, emit.constant(0.0), beta)
                    weighed = builder.fmul(beta, emit.load(emit.address(emission_at[r], k), emit.vector))
                    emit.store(builder.fmul(weighed, factors[r]), emit.address(kappas, apart[r], k))
                    wide.add_scaled(emit, wide.address(count_at[r], k), builder.fmul(alpha, beta), None)
                return []

            emit.loop(length, [], smooth)
            return context.get_dummy_value()

        return signature, codegen

    return smooth_rows


smooth_four, smooth_one = _make_smooth(4), _make_smooth(1)


def _make_block(rows: int, vectors: int, *, max_plus: bool, accumulate: bool):
    """Returns the intrinsic ``block(like, c, c_row, x, x_row, x_col, y, y_row, depth)`` on element addresses."""

    @intrinsic
    def block(typing_context, like, c, c_row, x, x_row, x_col, y, y_row, depth):
        is_double = like == types.float64
        signature = types.void(like, *[types.intp] * 8)

        def codegen(context, builder, signature, args):
            emit = Emitter(builder, is_double)
            _, c, c_row, x, x_row, x_col, y, y_row, depth = args
            places = [(r, v) for r in range(rows) for v in range(vectors)]
            c_at = {
                (r, v): emit.address(c, builder.mul(c_row, emit.word(r)), emit.word(v * emit.lanes)) for r, v in places
            }
            neutral = emit.constant(float("-inf") if max_plus else 0.0)
            start = {place: emit.load(c_at[place], emit.vector) if accumulate else neutral for place in places}
            results = multiply_block(emit, rows, vectors, start, x, x_row, x_col, y, y_row, depth, max_plus=max_plus)
            for place in places:
                emit.store(results[place], c_at[place])
            return context.get_dummy_value()

        return signature, codegen

    return block


def make_product(*, max_plus: bool, accumulate: bool):
    """Returns the compiled function ``product(like, c, x, x_row, x_col, y, y_row, rows, columns, depth)``.

    It computes ``C[r, j] (+)= sum_k X[r, k] Y[k, j]`` for numbers of the type of `like` at the addresses `c`, `x` and
    `y`. The rows of C are `columns` elements apart and those of Y `y_row` elements. X has the strides `x_row` and
    `x_col`. `columns` must be a multiple of the vector width.
    """
    four_wide = _make_block(4, _WIDEST, max_plus=max_plus, accumulate=accumulate)
    eight_one = _make_block(8, 1, max_plus=max_plus, accumulate=accumulate)  # More rows hide the latency of one vector.
    four_one = _make_block(4, 1, max_plus=max_plus, accumulate=accumulate)
    one_wide = _make_block(1, _WIDEST, max_plus=max_plus, accumulate=accumulate)
    one_one = _make_block(1, 1, max_plus=max_plus, accumulate=accumulate)
    twelve_one = _make_block(12, 1, max_plus=max_plus, accumulate=accumulate)

    @njit(nogil=True)
    def product(like, c, x, x_row, x_col, y, y_row, rows, columns, depth):
        lanes = lanes_of(like)
        size = VECTOR_BYTES // lanes
        wide = _WIDEST * lanes
        r = 0
        # Rows of one vector occur in two layouts. Constant strides save most of the address computations.
        if not accumulate and columns == lanes and y_row == lanes and x_row == lanes and x_col == 1:
            while r + 4 <= rows:
                if r + 8 <= rows:
                    eight_one(like, c + r * lanes * size, lanes, x + r * lanes * size, lanes, 1, y, lanes, depth)
                    r += 8
                else:
                    four_one(like, c + r * lanes * size, lanes, x + r * lanes * size, lanes, 1, y, lanes, depth)
                    r += 4
        if accumulate and columns == lanes and y_row == lanes and x_row == 1 and x_col == lanes:
            while r + 4 <= rows:
                if r + 12 == rows:
                    twelve_one(like, c + r * lanes * size, lanes, x + r * size, 1, lanes, y, lanes, depth)
                    r += 12
                elif r + 8 <= rows:
                    eight_one(like, c + r * lanes * size, lanes, x + r * size, 1, lanes, y, lanes, depth)
                    r += 8
                else:
                    four_one(like, c + r * lanes * size, lanes, x + r * size, 1, lanes, y, lanes, depth)
                    r += 4
        while columns < wide and r + 8 <= rows:
            for j in range(0, columns, lanes):
                eight_one(
                    like,
                    c + (r * columns + j) * size,
                    columns,
                    x + r * x_row * size,
                    x_row,
                    x_col,
                    y + j * size,
                    y_row,
                    depth,
                )
            r += 8
        while r < rows:
            four = r + 4 <= rows
            c_row, x_first = c + r * columns * size, x + r * x_row * size
            j = 0
            while j < columns:
                if four and j + wide <= columns:
                    four_wide(like, c_row + j * size, columns, x_first, x_row, x_col, y + j * size, y_row, depth)
                    j += wide
                elif four:
                    four_one(like, c_row + j * size, columns, x_first, x_row, x_col, y + j * size, y_row, depth)
                    j += lanes
                elif j + wide <= columns:
                    one_wide(like, c_row + j * size, columns, x_first, x_row, x_col, y + j * size, y_row, depth)
                    j += wide
                else:
                    one_one(like, c_row + j * size, columns, x_first, x_row, x_col, y + j * size, y_row, depth)
                    j += lanes
            r += 4 if four else 1

    return product
