/* Common parts of writing and reading dense streams: states of symbols in tables, and the threads of a stream. */
#ifndef KERNELS_CUDA_DENSE_H
#define KERNELS_CUDA_DENSE_H

#include "kernels/cuda/launch.h"
#include "kernels/scalar.h"

/* ---- threads: eight per stream ---- */

#define SPREAD_WARP   32u
#define SPREAD_WARPS  (LAUNCH_THREADS / SPREAD_WARP)
#define SPREAD_EACH   (LAUNCH_THREADS / DEVICE_STREAM_LANES) /* largest number of streams of a block */
#define SPREAD_BLOCKS 256u /* blocks that share few streams: a stream waits for memory nearly all the time */

static inline uint32_t spread_blocks(uint32_t count) {
    uint32_t full = (count + SPREAD_EACH - 1) / SPREAD_EACH,
             few = count < SPREAD_BLOCKS ? count : SPREAD_BLOCKS;
    return full > few ? full : few;
}

/* Spreads streams over blocks first, then over warps, and only then over the threads of a warp. */
DEVICE_FN uint32_t spread_stream(const place *at) {
    uint32_t warp = at->thread / SPREAD_WARP, in_warp = at->thread % SPREAD_WARP / DEVICE_STREAM_LANES;
    return (in_warp * SPREAD_WARPS + warp) * at->blocks + at->block;
}

/* ---- tables: one block each ---- */

typedef struct table_shared {
    uint8_t owner[1u << DEVICE_STREAM_LOG]; /* each state's symbol, counted from the table's first */
} table_shared;

typedef struct table_own {
    uint32_t unused;
} table_own;

DEVICE_FN uint32_t table_symbols(const device_tables *t, uint32_t table) {
    return t->first[table + 1] - t->first[table];
}

/* Assigns states to symbol `thread` of the table, if there is one. */
DEVICE_FN void table_spread(const device_tables *t, uint32_t table, uint32_t thread, table_shared *s) {
    if (thread < table_symbols(t, table)) {
        const device_symbol *symbol = &t->symbol[t->first[table] + thread];
        uint32_t states = 1u << t->log, stride = (states >> 1) + (states >> 3) + 3,
                 end = symbol->before + symbol->states;
        for (uint32_t i = symbol->before; i < end; i++) {
            s->owner[i * stride & (states - 1)] = (uint8_t)thread;
        }
    }
}

/*
 * Spreads the symbols of the block's table in phase 0. Returns true in phase 1, when all states have owners,
 * if the table exists.
 */
DEVICE_FN bool table_is_spread(const place *at, const device_tables *t, table_shared *s, int phase) {
    if (phase == 0 && at->block < t->tables) {
        table_spread(t, at->block, at->thread, s);
    }
    return phase == 1 && at->block < t->tables;
}

/* floor(log2 n), n >= 1. */
DEVICE_FN uint32_t floor_log2(uint32_t n) {
    return scalar_bit_length(n) - 1u;
}

#endif
