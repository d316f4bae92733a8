"""Attention on CPUs, in prefill and decode: of queries to all keys, or of each query to its chosen tiles.

A tile is the keys and values of one chunk of one KV head. An item is a task, which `rows.attend_rows` computes. Only
shapes and chosen tiles determine the tasks, so a result's bits do not depend on the number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import carray, float32, int64

from lce.kernels.routed.eights_body import EIGHT, attend_eights
from lce.kernels.rows.rows_body import FEW_ROWS, LOWEST, _pairs, few_fit, finish, put_query, scratch
from lce.kernels.runtime.compiling import arguments, by_dtype, call, inner, kernel, number_of
from lce.kernels.runtime.numbers import exp2, following, itemsize, pointer, stored
from lce.kernels.runtime.shared import ALIGNED, KEYS, TURN_KEYS
from lce.kernels.runtime.threads_body import add
from lce.kernels.runtime.vectors import prefetch, prefetch_far


@by_dtype(inner)
def _add_piece(state, sums, top, total, numbers, dim):
    """Add a piece's result to a row's: its top score, the sum of its weights, and `numbers [D]`, its weighted sums."""
    new_top = max(state[0], top)
    own, other = exp2(state[0] - new_top), exp2(top - new_top)
    state[0], state[1] = new_top, state[1] * own + total * other
    for d in range(dim):
        sums[d] = sums[d] * own + numbers[d] * other


@inner
def _copy(state, sums, state_to, sums_to):
    """Copy a row's result: its top score, the sum of its weights, and its weighted sums."""
    state_to[0], state_to[1] = state[0], state[1]
    for d in range(len(sums_to)):
        sums_to[d] = sums[d]


@by_dtype(inner)
def _merge_pieces(states, partial, dim):
    """Merge results for n pieces of keys into piece 0: `states [n, 2]` (top score, weights' sum), `partial [n, D]`."""
    for part in range(1, len(states)):
        _add_piece(states[0], partial[0], states[part, 0], states[part, 1], partial[part], dim)


@by_dtype(kernel)
def dense_tasks(first_task, stop_task, memory, args):
    """Attend all keys: `out [H, T, D]` and `lse [H, T]` of `q [H, T, D]` and `k v [G, N, D]`.

    A task is a block of `per_block` queries of the heads of a group, with one piece of the keys if `split`; tasks with
    the same piece follow each other, and the thread that does a block's last piece merges them in order.
    Multiplications: about 2·H·T·N·D, half of it if causal.
    """
    q_at, k_at, v_at, cos_at, sin_at, out_at, lse_at = arguments(args, 7)
    groups, rep, n_queries, n_keys, dim, causal, window, per_block, piece, split = arguments(args + 56, 10)
    few, place, unseen, n_turns = arguments(args + 136, 4)
    q_head, q_row, k_group, k_row, v_group, v_row, steepness, rows_at, plain_at, partial_at = arguments(args + 168, 10)
    done = args + 248  # the address of each block's count of done pieces
    out = carray(pointer(out_at, stored), (groups * rep * n_queries, dim))
    lse = carray(pointer(lse_at, float32), (groups * rep * n_queries,))
    n_blocks, n_pieces = (n_queries + per_block - 1) // per_block, (place + n_keys + piece - 1) // piece
    n_parts = n_pieces if split else np.int64(1)
    n_rows, n_all = rep * per_block, groups * n_blocks
    wide = (dim + 15) // 16 * 16
    partial = carray(pointer(partial_at, float32), (n_all, n_rows, n_parts, wide))
    states = carray(pointer(partial_at + 4 * n_all * n_parts * n_rows * wide, float32), (n_all, n_rows, n_parts, 2))
    given, memory = carray(pointer(memory, int64), (12,)), memory + 128
    totals, memory = following(memory, float32, (n_rows, wide))
    tops, memory = carray(pointer(memory, float32), (n_rows, 2)), memory + (8 * n_rows + 63) // 64 * 64
    queries, spans, state, sums, _, _, _, _ = scratch(memory, n_rows, dim)
    given[0], given[1], given[2], given[8] = memory, n_rows, dim, steepness
    given[5], given[7] = k_row * itemsize, v_row * itemsize
    given[9], given[10], given[11] = few, place % KEYS, plain_at
    for task in range(first_task, stop_task):
        group, part, block = task // (n_blocks * n_parts), task // n_blocks % n_parts, task % n_blocks
        if causal:  # the last queries see the most keys, so their tasks start first
            block = n_blocks - 1 - block
        which = group * n_blocks + block
        first_query = block * per_block
        n = min(per_block, n_queries - first_query)
        first, stop = unseen, n_keys
        if causal:
            behind = n_keys - n_queries + first_query
            first, stop = max(first, behind - window + 1), min(stop, behind + n)
        for row in range(rep * n):
            head, query = row // n, first_query + row % n
            at = q_at + ((group * rep + head) * q_head + query * q_row) * itemsize
            turn, to = (group % n_turns * n_queries + query) * (dim // 2) * itemsize, queries[row].ctypes.data
            turned = cos_at != 0
            put_query(at, cos_at + turn if turned else at, sin_at + turn if turned else at, dim, turned, to)
            seen = n_keys - n_queries + query + 1 if causal else n_keys
            spans[row, 0], spans[row, 1] = max(seen - window, unseen) if causal else unseen, seen
            tops[row, 0], tops[row, 1] = LOWEST, 0
            totals[row] = 0
        given[3], given[4] = rep * n, k_at + group * k_group * itemsize
        given[6] = v_at + group * v_group * itemsize
        if not few:  # a generated query's sums begin with the first key that it sees, as in its own step
            first = first // ALIGNED * ALIGNED
        number, last = (part, part + 1) if split else ((place + first) // piece, n_pieces)
        while number < last:
            begin, end = max(first, number * piece - place), min(stop, number * piece + piece - place)
            number += 1
            if begin >= end:
                continue
            for row in range(rep * n):
                state[row, 0], state[row, 1] = LOWEST, 0
                sums[row] = 0
            call(rows_at, begin, end, given.ctypes.data)
            for row in range(rep * n):
                _add_piece(tops[row], totals[row], state[row, 0], state[row, 1], sums[row], wide)
        for row in range(rep * n):
            if n_parts > 1:
                _copy(tops[row], totals[row], states[which, row, part], partial[which, row, part])
            else:
                at = (group * rep + row // n) * n_queries + first_query + row % n
                finish(tops[row], totals[row], out, lse, at, dim)
        if n_parts > 1 and add(done + 8 * which, 1) == n_parts - 1:  # all other pieces of this block are done
            for row in range(rep * n):
                _merge_pieces(states[which, row], partial[which, row], wide)
                at = (group * rep + row // n) * n_queries + first_query + row % n
                finish(states[which, row, 0], partial[which, row, 0], out, lse, at, dim)


@inner
def _group_by_chunk(chosen, first, stop, counts, entries):
    """Sort a task's choices, `chosen [rows, slots]` in slots `first..stop-1`, by chunk: a counting sort.

    An entry is `row * slots + slot`. The entries of chunk c end at `counts[c]`. Choices below 0 have no entry.
    """
    counts[:] = 0
    rows, n_slots = chosen.shape
    for row in range(rows):
        for slot in range(first, stop):
            counts[chosen[row, slot] + 1] += 1  # number 0 counts the choices of no chunk
    counts[0] = 0
    for chunk in range(1, len(counts)):
        counts[chunk] += counts[chunk - 1]
    for row in range(rows):
        for slot in range(first, stop):
            chunk = chosen[row, slot]
            if chunk >= 0:
                entries[counts[chunk]] = row * n_slots + slot
                counts[chunk] += 1


@inner
def _different_rows(entries, begin, end, n_slots):
    """Return where the first entries from `begin` on end whose rows differ: at `end`, unless a row chose twice."""
    for i in range(begin + 1, end):
        if entries[i] // n_slots == entries[i - 1] // n_slots:
            return i
    return end


@inner
def _chose_alike(choices, query, rep, n_queries):
    """Return whether the `rep` heads of a query, which share a KV head, chose the same tiles, in ascending order."""
    own, different, last = choices[query], np.int64(0), np.int64(-1)
    for slot in range(len(own)):
        different |= np.int64(0 <= own[slot] <= last)
        last = max(last, own[slot])
    for head in range(1, rep):
        other = choices[head * n_queries + query]
        for slot in range(len(own)):
            different |= own[slot] ^ other[slot]
    return different == 0


@by_dtype(inner)
def _attend_in_turn(own, turns, tiles, vectors, stored_at, size, dim, queries, given, rows_at):
    """Attend one query's tiles `own`, one after another, with the rows of the heads that chose them.

    Slot s has the rotation `turns[s]`, or all slots `turns[0]`. `given` are the arguments of `attend_rows`, which has
    the results; `queries` are its rotated queries.
    """
    (q_at, q_head, cos_at, sin_at), (k_at, k_tile, v_at, v_tile) = vectors, stored_at
    turned, rows, k_row = np.int64(-1), given[3], given[5]
    for slot in range(len(own)):
        which = tiles[own[slot]] if own[slot] >= 0 else np.int64(-1)
        if slot + 1 < len(own) and own[slot + 1] >= 0:
            following = k_at + max(tiles[own[slot + 1]], 0) * k_tile
            for i in range(size):
                for line in range(0, dim * itemsize, 64):
                    prefetch_far(following + i * k_row + line)
        if which < 0:
            continue
        turn = turns[slot % len(turns)] * (dim // 2) * itemsize
        if turn != turned:
            for row in range(rows):
                put_query(q_at + row * q_head, cos_at + turn, sin_at + turn, dim, True, queries[row].ctypes.data)
            turned = turn
        given[4], given[6] = k_at + which * k_tile, v_at + which * v_tile
        call(rows_at, 0, size, given.ctypes.data)


@by_dtype(kernel)
def routed_tasks(first_task, stop_task, memory, args):
    """Add attention of queries `[H, T, D]` to their chosen tiles to sums `[H · T, pieces, wide]`; H = groups · rep.

    A task is some queries of the heads of a group, with `piece` of their K slots. Queries are rotated for each slot. A
    tile `[L, D]` is attended once for all rows that chose it. Multiplications: about 2·H·T·K·L·D.
    """
    q_at, cos_at, sin_at, turn_at, chosen_at, tile_at, k_at, v_at, state_at, sums_at = arguments(args, 10)
    groups, rep, n_queries, n_slots, n_turns, n_chunks, size, dim, per_block, piece, begun = arguments(args + 80, 11)
    q_head, q_row, k_tile, k_row, v_tile, v_row, steepness, few, rows_at, plain_at = arguments(args + 168, 10)
    n_blocks, n_pieces = (n_queries + per_block - 1) // per_block, (n_slots + piece - 1) // piece
    n_rows, wide = rep * per_block, (dim + 15) // 16 * 16
    choices = carray(pointer(chosen_at, int64), (groups * rep * n_queries, n_slots))
    tiles = carray(pointer(tile_at, int64), (groups, n_chunks))
    turns = carray(pointer(turn_at, int64), (n_queries, n_turns))
    states = carray(pointer(state_at, float32), (groups * rep * n_queries, n_pieces, 2))
    partial = carray(pointer(sums_at, float32), (groups * rep * n_queries, n_pieces, wide))
    given, memory = carray(pointer(memory, int64), (12,)), memory + 128
    counts, memory = following(memory, int64, (n_chunks + 1,))
    chosen, memory = following(memory, int64, (n_rows, n_slots))
    entries, memory = following(memory, int64, (n_rows * piece,))
    memory = (memory + 63) // 64 * 64
    parts = scratch(memory, n_rows, dim)
    queries, spans, state, sums, _, _, _, _ = parts
    given[0], given[1], given[2], given[8] = memory, n_rows, dim, steepness
    given[5], given[7] = k_row * itemsize, v_row * itemsize
    given[10], given[11] = 0, plain_at
    fits = rows_at == plain_at and 2 <= rep <= FEW_ROWS and size <= TURN_KEYS * rep and few_fit(dim, size, rep)
    in_turn = _pairs and fits  # in float32, rows of many queries are faster
    for task in range(first_task, stop_task):
        group, block, part = task // (n_blocks * n_pieces), task // n_pieces % n_blocks, task % n_pieces
        first_query = block * per_block
        n = min(per_block, n_queries - first_query)
        slots, stop = part * piece, min(n_slots, part * piece + piece)
        given[3], given[9] = rep, 1
        for query in range(first_query, first_query + n):
            heads = group * rep * n_queries + query
            alike = in_turn and _chose_alike(choices[group * rep * n_queries :], query, rep, n_queries)
            for row in range(rep):
                at, own = heads + row * n_queries, row * n + query - first_query
                for slot in range(slots, stop):
                    chosen[own, slot] = -1 if alike else choices[at, slot]
                if not begun:
                    states[at, part, 0], states[at, part, 1] = LOWEST, 0
                    partial[at, part] = 0
            if not alike:
                continue
            for row in range(rep):
                at = heads + row * n_queries
                spans[row, 0], spans[row, 1] = 0, size
                _copy(states[at, part], partial[at, part], state[row], sums[row])
            places = turns[query, slots:stop] if n_turns == n_slots else turns[query]
            vectors = q_at + (group * rep * q_head + query * q_row) * itemsize, q_head * itemsize, cos_at, sin_at
            stored_at = k_at, k_tile * itemsize, v_at, v_tile * itemsize
            some = choices[heads, slots:stop]
            if size == EIGHT:
                rows = rep, dim, given[5], given[7]
                attend_eights(some, places, tiles[group], vectors, stored_at, rows, parts, number_of(steepness))
            else:
                _attend_in_turn(some, places, tiles[group], vectors, stored_at, size, dim, queries, given, rows_at)
            for row in range(rep):
                at = heads + row * n_queries
                _copy(state[row], sums[row], states[at, part], partial[at, part])
        given[9] = few
        _group_by_chunk(chosen[: rep * n], slots, stop, counts, entries)
        begin, chunk = np.int64(0), np.int64(0)
        while chunk < n_chunks:
            end, which = _different_rows(entries, begin, counts[chunk], n_slots), tiles[group, chunk]
            found = entries[begin:end]
            begin = end
            chunk += np.int64(begin == counts[chunk])
            if len(found) == 0 or which < 0:
                continue
            for i in range(len(found)):  # the rows' vectors are far apart: loads begin here, and waits are shared
                row, slot = found[i] // n_slots, found[i] % n_slots
                head, query = group * rep + row // n, first_query + row % n
                spans[i, 0] = turns[query, slot % n_turns] * (dim // 2) * itemsize
                found[i] = head * n_queries + query
                for line in range(0, dim // 2 * itemsize, 64):
                    prefetch(cos_at + spans[i, 0] + line)
                    prefetch(sin_at + spans[i, 0] + line)
            for i in range(len(found)):
                turn, at = spans[i, 0], found[i]
                vector = q_at + (at // n_queries * q_head + at % n_queries * q_row) * itemsize
                put_query(vector, cos_at + turn, sin_at + turn, dim, True, queries[i].ctypes.data)
                _copy(states[at, part], partial[at, part], state[i], sums[i])
                spans[i, 0], spans[i, 1] = 0, size
            given[3], given[4] = len(found), k_at + which * k_tile * itemsize
            given[6] = v_at + which * v_tile * itemsize
            call(rows_at, 0, size, given.ctypes.data)
            for i in range(len(found)):
                _copy(state[i], sums[i], states[found[i], part], partial[found[i], part])


@by_dtype(kernel)
def finish_chosen(first, stop, _memory, state_at, sums_at, out_at, lse_at, n_pieces, dim):
    """Merge the pieces of rows `first..stop-1`, and write their outputs `[H · T, D]` and log-sum-exps `[H · T]`."""
    wide = (dim + 15) // 16 * 16
    states = carray(pointer(state_at, float32), (stop, n_pieces, 2))
    partial = carray(pointer(sums_at, float32), (stop, n_pieces, wide))
    out, lse = carray(pointer(out_at, stored), (stop, dim)), carray(pointer(lse_at, float32), (stop,))
    for row in range(first, stop):
        if n_pieces > 1:
            _merge_pieces(states[row], partial[row], dim)
        finish(states[row, 0], partial[row, 0], out, lse, row, dim)
