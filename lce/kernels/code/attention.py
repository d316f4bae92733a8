"""Attention on CPUs, in prefill and decode: of queries to all keys, or of each query to its chosen tiles.

A tile is the keys and values of one chunk of one KV head. An item is a task, which `rows.attend_rows` computes. Only
shapes and chosen tiles determine the tasks, so a result's bits do not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import carray, float32, int64

from lce.kernels.code.compiling import arguments, by_dtype, call, inner, kernel
from lce.kernels.code.numbers import exp2, itemsize, log2, pointer, read, stored, write
from lce.kernels.code.rows import LOWEST, finish, put_query, scratch
from lce.kernels.code.shared import QUERY_ROWS
from lce.kernels.code.vectors import prefetch, take


@by_dtype(inner)
def _merge_pieces(states, partial, dim):
    """Merge results for n pieces of keys into piece 0: `states [n, 2]` (top score, weights' sum), `partial [n, D]`."""
    top = LOWEST
    for part in range(len(states)):
        top = max(top, states[part, 0])
    for part in range(1, len(states)):
        shrink = exp2(states[part, 0] - top)
        if part == 1:
            own = exp2(states[0, 0] - top)
            states[0, 1] *= own
            for d in range(dim):
                partial[0, d] *= own
        states[0, 1] += states[part, 1] * shrink
        for d in range(dim):
            partial[0, d] += partial[part, d] * shrink
    states[0, 0] = top


@by_dtype(kernel)
def attend(first_task, stop_task, memory, args):
    q_at, k_at, v_at, cos_at, sin_at, out_at, lse_at = arguments(args, 7)
    groups, rep, n_queries, n_keys, dim, causal, window, per_block, piece = arguments(args + 56, 9)
    q_head, q_row, k_group, k_row, v_group, v_row, steepness, rows_at, plain_at, partial_at = arguments(args + 128, 10)
    done = args + 208  # the address of each KV head's count of done pieces
    out = carray(pointer(out_at, stored), (groups * rep * n_queries, dim))
    lse = carray(pointer(lse_at, float32), (groups * rep * n_queries,))
    n_blocks, n_pieces = (n_queries + per_block - 1) // per_block, (n_keys + piece - 1) // piece
    n_tasks, n_rows = groups * n_blocks * n_pieces, rep * per_block
    wide = (dim + 15) // 16 * 16
    partial = carray(pointer(partial_at, float32), (groups, n_rows, n_pieces, wide))
    states_at = partial_at + 4 * n_tasks * n_rows * wide
    states = carray(pointer(states_at, float32), (groups, n_rows, n_pieces, 2))
    given, memory = carray(pointer(memory, int64), (10,)), memory + 128
    queries, spans, state, sums, _, _, _, _ = scratch(memory, n_rows, dim)
    given[0], given[1], given[2], given[8] = memory, n_rows, dim, steepness
    given[5], given[7], given[9] = k_row * itemsize, v_row * itemsize, plain_at
    for task in range(first_task, stop_task):
        group, block, part = task // (n_blocks * n_pieces), task // n_pieces % n_blocks, task % n_pieces
        if causal:  # the last queries see the most keys, so their tasks start first
            block = n_blocks - 1 - block
        first_query = block * per_block
        n = min(per_block, n_queries - first_query)
        first, stop = part * piece, min(n_keys, part * piece + piece)
        if causal:
            behind = n_keys - n_queries + first_query
            first, stop = max(first, behind - window + 1), min(stop, behind + n)
        for row in range(rep * n):
            head, query = row // n, first_query + row % n
            at = q_at + ((group * rep + head) * q_head + query * q_row) * itemsize
            turn, turned, to = query * (dim // 2) * itemsize, cos_at != 0, queries[row].ctypes.data
            put_query(at, cos_at + turn if turned else at, sin_at + turn if turned else at, dim, turned, to)
            seen = n_keys - n_queries + query + 1 if causal else n_keys
            spans[row, 0], spans[row, 1] = max(seen - window, 0) if causal else 0, seen
            state[row, 0], state[row, 1] = LOWEST, 0
            sums[row] = 0
        given[3], given[4] = rep * n, k_at + group * k_group * itemsize
        given[6] = v_at + group * v_group * itemsize
        call(rows_at, first, stop, given.ctypes.data)
        for row in range(rep * n):
            if n_pieces > 1:
                states[group, row, part, 0], states[group, row, part, 1] = state[row, 0], state[row, 1]
                for d in range(wide):
                    partial[group, row, part, d] = sums[row, d]
            else:
                at = (group * rep + row // n) * n_queries + first_query + row % n
                finish(state[row], sums[row], out, lse, at, dim)
        if n_pieces > 1 and take(done + 8 * group) == n_pieces - 1:  # all other pieces of this KV head are done
            for row in range(n_rows):
                _merge_pieces(states[group, row], partial[group, row], dim)
                finish(states[group, row, 0], partial[group, row, 0], out, lse, group * n_rows + row, dim)


@by_dtype(kernel)
def attend_tiles(first_task, stop_task, memory, args):
    q_at, cos_at, sin_at, sorted_at, k_at, v_at, out_at, lse_at = arguments(args, 8)
    n_heads, n_queries, n_slots, n_turns, size, dim = arguments(args + 64, 6)
    q_head, q_row, k_tile, k_row, v_tile, v_row, steepness, rows_at, plain_at = arguments(args + 112, 9)
    n_rows = n_heads * n_queries * n_slots
    out = carray(pointer(out_at, stored), (n_rows, dim))
    lse = carray(pointer(lse_at, float32), (n_rows,))
    order_at, tile_at, tasks_at = arguments(sorted_at + 8, 3)
    order, tile = carray(pointer(order_at, int64), (n_rows,)), carray(pointer(tile_at, int64), (n_rows,))
    tasks = carray(pointer(tasks_at, int64), (n_rows + 1,))
    given, memory = carray(pointer(memory, int64), (10,)), memory + 128
    queries, spans, state, sums, _, _, _, _ = scratch(memory, QUERY_ROWS, dim)
    given[0], given[1], given[2], given[8] = memory, QUERY_ROWS, dim, steepness
    given[5], given[7], given[9] = k_row * itemsize, v_row * itemsize, plain_at
    for task in range(first_task, stop_task):
        first, n = tasks[task], tasks[task + 1] - tasks[task]
        for i in range(n):  # the rows' vectors are far apart in memory: loads begin here, and waits are shared
            row = order[first + i]
            query, slot = row // n_slots, row % n_slots
            head, query = query // n_queries, query % n_queries
            spans[i, 0] = (head * q_head + query * q_row) * itemsize
            spans[i, 1] = (query * n_turns + slot % n_turns) * (dim // 2) * itemsize
            for line in range(0, dim * itemsize, 64):
                prefetch(q_at + spans[i, 0] + line)
                prefetch(out_at + row * dim * itemsize + line)
            for line in range(0, dim // 2 * itemsize, 64):
                prefetch(cos_at + spans[i, 1] + line)
                prefetch(sin_at + spans[i, 1] + line)
        for i in range(n):
            turn = spans[i, 1]
            put_query(q_at + spans[i, 0], cos_at + turn, sin_at + turn, dim, True, queries[i].ctypes.data)
            spans[i, 0], spans[i, 1] = 0, size
            state[i, 0], state[i, 1] = LOWEST, 0
            sums[i] = 0
        which = tile[order[first]]
        given[3], given[4], given[6] = n, k_at + which * k_tile * itemsize, v_at + which * v_tile * itemsize
        call(rows_at, 0, size, given.ctypes.data)
        for i in range(n):
            finish(state[i], sums[i], out, lse, order[first + i], dim)


@kernel
def sort_rows(_first, _stop, _memory, tile_at, n_rows, n_tiles, at):
    """Sort the rows whose tile is not -1 by tile, and cut them into tasks: a stable radix sort with 11-bit digits.

    Writes four integers to the address `at`: the number of tasks; the addresses of the sorted rows' numbers, of `tile`,
    and of the index of each task's first row among the sorted rows. Uses `3 * n_rows + 2054` integers from there on.
    """
    tile, found = carray(pointer(tile_at, int64), (n_rows,)), carray(pointer(at, int64), (4,))
    starts, tasks = carray(pointer(at + 32, int64), (2049,)), carray(pointer(at + 16424, int64), (n_rows + 1,))
    order_at = at + 16432 + 8 * n_rows
    order, spare = carray(pointer(order_at, int64), (n_rows,)), carray(pointer(order_at + 8 * n_rows, int64), (n_rows,))
    n = 0
    for row in range(len(tile)):
        if tile[row] >= 0:
            order[n] = row
            n += 1
    shift = 0
    while (n_tiles - 1) >> shift:
        starts[:] = 0
        for i in range(n):
            starts[(tile[order[i]] >> shift & 2047) + 1] += 1
        for digit in range(2048):
            starts[digit + 1] += starts[digit]
        for i in range(n):
            digit = tile[order[i]] >> shift & 2047
            spare[starts[digit]] = order[i]
            starts[digit] += 1
        order, spare = spare, order
        shift += 11
    n_tasks, begin = 0, 0
    for i in range(n):
        if i == 0 or tile[order[i]] != tile[order[i - 1]] or i - begin == QUERY_ROWS:
            tasks[n_tasks] = begin = i
            n_tasks += 1
    tasks[n_tasks] = n
    found[0], found[1], found[2], found[3] = n_tasks, order.ctypes.data, tile_at, tasks.ctypes.data


@by_dtype(kernel)
def merge_slots(first, stop, memory, out_at, lse_at, merged_at, total_at, n_slots, dim):
    out = carray(pointer(out_at, stored), (stop, n_slots, dim))
    lse = carray(pointer(lse_at, float32), (stop, n_slots))
    merged = carray(pointer(merged_at, stored), (stop, dim))
    total = carray(pointer(total_at, float32), (stop,))
    per_log2, sums = np.float32(1.4426950408889634), carray(pointer(memory, float32), (dim,))
    for row in range(first, stop):
        top = np.float32(-np.inf)
        for slot in range(n_slots):
            top = max(top, lse[row, slot])
        sums[:] = 0
        weights = np.float32(0)
        for slot in range(n_slots):
            if lse[row, slot] == -np.inf:
                continue
            weight, part = exp2((lse[row, slot] - top) * per_log2), out[row, slot]
            weights += weight
            for d in range(dim):
                sums[d] += weight * read(part[d])
        share = np.float32(1) / weights if weights != 0 else np.float32(0)
        for d in range(dim):
            merged[row, d] = write(sums[d] * share)
        total[row] = top + log2(weights) / per_log2 if weights != 0 else np.float32(-np.inf)
