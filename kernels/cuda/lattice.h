/*
 * Lossy tiles: integers from values, and values from integers. The arithmetic is that of
 * kernels/scalar_lattice.h, bit for bit as on the CPU. A thread takes four elements; each input is read once.
 */
#ifndef KERNELS_CUDA_LATTICE_H
#define KERNELS_CUDA_LATTICE_H

#include "kernels/cuda/launch.h"
#include "kernels/scalar_lattice.h"

#define LATTICE_EACH   4u            /* elements per thread */
#define LEVEL_SUM_UNIT 1073741824.0f /* 2^30: the unit of device_level_sums.below */

typedef struct ALIGNED(16) four_floats {
    float at[LATTICE_EACH];
} four_floats;
typedef struct ALIGNED(4) four_bytes {
    int8_t at[LATTICE_EACH];
} four_bytes;
typedef struct ALIGNED(16) four_integers {
    int32_t at[LATTICE_EACH];
} four_integers;

/* The n elements of a thread, and the first one's position in the matrix. */
typedef struct lattice_four {
    uint64_t first, row, column;
    uint32_t n;
} lattice_four;

DEVICE_FN lattice_four lattice_four_of(const place *at, uint64_t count, uint64_t columns, uint64_t phase) {
    lattice_four f;
    f.first = ((uint64_t)at->block * LAUNCH_THREADS + at->thread) * LATTICE_EACH;
    f.n = f.first < count ? (uint32_t)(count - f.first < LATTICE_EACH ? count - f.first : LATTICE_EACH) : 0;
    uint64_t from = phase + f.first;
    if (((phase + count) | columns) >> 32 == 0) { /* 32-bit division takes a quarter of the time */
        f.row = (uint32_t)from / (uint32_t)columns;
        f.column = (uint32_t)from % (uint32_t)columns;
    } else {
        f.row = from / columns;
        f.column = from % columns;
    }
    return f;
}
/* Goes to the next element. */
DEVICE_FN void lattice_next(lattice_four *f, uint64_t columns) {
    f->column++;
    if (f->column == columns) {
        f->column = 0;
        f->row++;
    }
}

/* Accesses four elements at once if all exist and are aligned. Missing elements are 0. */
#define DEFINE_FOUR(type, four)                                                   \
    DEVICE_FN four load_##four(const type *from, const lattice_four *f) {         \
        four v = {{0, 0, 0, 0}};                                                  \
        if (!from) {                                                              \
            return v;                                                             \
        }                                                                         \
        if (f->n == LATTICE_EACH && (uintptr_t)from % sizeof(four) == 0) {        \
            return *(const four *)(const void *)(from + f->first);                \
        }                                                                         \
        UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {                      \
            v.at[j] = j < f->n ? from[f->first + j] : 0;                          \
        }                                                                         \
        return v;                                                                 \
    }                                                                             \
    DEVICE_FN void store_##four(type *to, const lattice_four *f, const four *v) { \
        if (f->n == LATTICE_EACH && (uintptr_t)to % sizeof(four) == 0) {          \
            *(four *)(void *)(to + f->first) = *v;                                \
            return;                                                               \
        }                                                                         \
        UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {                      \
            if (j < f->n) {                                                       \
                to[f->first + j] = v->at[j];                                      \
            }                                                                     \
        }                                                                         \
    }
DEFINE_FOUR(float, four_floats)
DEFINE_FOUR(int8_t, four_bytes)
DEFINE_FOUR(int32_t, four_integers)

DEVICE_FN float tile_step(const device_tile *t, const lattice_four *f) {
    float row = t->row_step[f->row];
    return t->column_step ? row * t->column_step[f->column] : row;
}
/* Lattice units of the low-rank part. */
DEVICE_FN int32_t tile_low(const device_tile *t, float low_rank, float step) {
    return t->low_rank || t->low_whole ? scalar_units((low_rank * t->low_rank_unit) * step) : 0;
}

DEVICE_FN four_floats tile_low_four(const device_tile *t, const lattice_four *f) {
    four_floats low = load_four_floats(t->low_rank, f);
    if (t->low_whole) {
        four_integers whole = load_four_integers(t->low_whole, f);
        UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {
            low.at[j] = (float)whole.at[j];
        }
    }
    return low;
}

/* ---- exceptions ---- */

DEVICE_FN void keep_one(const device_exceptions *k, uint64_t at) {
    uint64_t to = count_u64(k->count, 1);
    if (to < k->capacity) {
        k->list[to].at = (uint32_t)at;
    }
}

/* The rule of engine/lossy/exceptions.c. */
DEVICE_FN bool tile_keeps(const device_tile *t, float now, float parent_values) {
    const device_exceptions *k = &t->exceptions;
    bool from = t->parent_values && (scalar_magnitude(now - parent_values) > k->moved ||
                                     !(scalar_magnitude(parent_values) < k->max));
    return from || scalar_magnitude(now) > k->above || !(scalar_magnitude(now) < k->max);
}

DEVICE_FN void keep_elements(const place *at, const device_exception_copy *k) {
    uint64_t i = (uint64_t)at->block * LAUNCH_THREADS + at->thread;
    if (i >= k->count) {
        return;
    }
    uint32_t e = k->list[i].at;
    if (k->size == sizeof(uint16_t)) {
        uint16_t half = ((const uint16_t *)k->from)[e];
        ((uint16_t *)k->to)[e] = half;
        k->list[i].q = half;
    } else {
        uint32_t bits = ((const uint32_t *)k->from)[e];
        ((uint32_t *)k->to)[e] = bits;
        k->list[i].q = (int32_t)bits;
    }
}
KERNEL(keep_elements, device_exception_copy)

DEVICE_FN void scatter_elements(const place *at, const device_scattering *s) {
    uint64_t i = (uint64_t)at->block * LAUNCH_THREADS + at->thread;
    if (i >= s->count) {
        return;
    }
    if (s->size == sizeof(uint16_t)) {
        ((uint16_t *)s->to)[s->at[i]] = ((const uint16_t *)s->from)[i];
    } else {
        ((uint32_t *)s->to)[s->at[i]] = ((const uint32_t *)s->from)[i];
    }
}
KERNEL(scatter_elements, device_scattering)

/* ---- integers of a tile ---- */

#define QUANTISE_TURNS 4u  /* per block, so that it seldom adds to the tile's sums */
#define QUANTISE_SUMS  32u /* threads that add up each of the seven sums; integers can be added in any order */

/* Results of a block's threads, to be added to the tile's sums. */
typedef struct quantise_shared {
    int64_t below[3][LAUNCH_THREADS];
    uint32_t count[3][LAUNCH_THREADS];
    uint32_t misfits[LAUNCH_THREADS];
    uint64_t part[7][QUANTISE_SUMS];
} quantise_shared;

typedef struct quantise_own {
    uint32_t unused;
} quantise_own;

/* Results of one thread. */
typedef struct quantise_seen {
    int64_t below[3];
    uint32_t count[3], misfits;
} quantise_seen;

DEVICE_FN float tile_residual(const device_tile *t, const lattice_four *f, float now, float parent_values,
                              float low_rank) {
    float step = tile_step(t, f);
    int32_t by = tile_low(t, low_rank, step);
    float from = by ? scalar_move(parent_values, by, t->unit, t->per_unit) : parent_values;
    float r = (now - from) * t->per_unit / step;
    return scalar_magnitude(r) < LATTICE_LIMIT ? r : 0.0f;
}

DEVICE_FN int32_t quantise_one(const device_tile *t, const lattice_four *f, float now, float parent_values,
                               float low_rank, float *residual) {
    *residual = tile_residual(t, f, now, parent_values, low_rank);
    int32_t level = scalar_quantised(scalar_magnitude(*residual), t->up[0], 1.0f + t->up[1], 1.0f - t->up[2]);
    return *residual < 0.0f ? -level : level;
}

DEVICE_FN void quantise_four(const place *at, const device_tile *t, quantise_seen *seen) {
    lattice_four f = lattice_four_of(at, t->count, t->columns, t->phase), here = f;
    four_floats now = load_four_floats(t->now, &f), parent_values = load_four_floats(t->parent_values, &f),
                low = tile_low_four(t, &f);
    four_bytes q8 = {{0, 0, 0, 0}};
    UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {
        if (j < f.n) {
            float residual;
            int32_t q = quantise_one(t, &here, now.at[j], parent_values.at[j], low.at[j], &residual);
            if (t->exceptions.count &&
                (q > 127 || q < -127 || tile_keeps(t, now.at[j], parent_values.at[j]))) {
                keep_one(&t->exceptions, f.first + j);
                q = 0;
            }
            int32_t level = q < 0 ? -q : q;
            q8.at[j] = (int8_t)(level < 128 ? q : 0);
            seen->misfits += level > 127;
            float gap = (float)level - scalar_magnitude(residual);
            int64_t units = level < 128 ? (int64_t)(gap * LEVEL_SUM_UNIT) : 0;
            UNROLL for (int32_t w = 0; w < 3; w++) {
                bool so = level > 2 ? w == 2 : level == w + 1;
                seen->below[w] += so ? units : 0;
                seen->count[w] += so;
            }
            lattice_next(&here, t->columns);
        }
    }
    store_four_bytes(t->q8, &f, &q8);
}

DEVICE_FN void quantise_all(const place *at, const device_tile *t, quantise_shared *s) {
    quantise_seen seen = {{0, 0, 0}, {0, 0, 0}, 0};
    place turn = *at;
    for (uint32_t i = 0; i < QUANTISE_TURNS; i++) {
        turn.block = at->block * QUANTISE_TURNS + i;
        quantise_four(&turn, t, &seen);
    }
    UNROLL for (int32_t w = 0; w < 3; w++) {
        s->below[w][at->thread] = seen.below[w];
        s->count[w][at->thread] = seen.count[w];
    }
    s->misfits[at->thread] = seen.misfits;
}

/* Returns one thread's part of one of the seven sums. */
DEVICE_FN uint64_t quantise_sum(const quantise_shared *s, uint32_t which, uint32_t lane) {
    uint64_t sum = 0;
    for (uint32_t i = lane; i < LAUNCH_THREADS; i += QUANTISE_SUMS) {
        sum += which < 3 ? (uint64_t)s->below[which][i] : which < 6 ? s->count[which - 3][i] : s->misfits[i];
    }
    return sum;
}

DEVICE_FN void quantise_tile(const place *at, const device_tile *t, quantise_shared *s, quantise_own *own,
                             int phase) {
    uint32_t which = at->thread / QUANTISE_SUMS, lane = at->thread % QUANTISE_SUMS;
    (void)own;
    if (phase == 0) {
        quantise_all(at, t, s);
    } else if (phase == 1 && which < 7) {
        s->part[which][lane] = quantise_sum(s, which, lane);
    } else if (phase == 2 && which < 7 && lane == 0) {
        uint64_t sum = 0;
        for (uint32_t i = 0; i < QUANTISE_SUMS; i++) {
            sum += s->part[which][i];
        }
        if (sum) {
            add_u64(which < 3   ? (uint64_t *)&t->sums->below[which]
                    : which < 6 ? &t->sums->count[which - 3]
                                : &t->sums->misfits,
                    sum);
        }
    }
}
KERNEL_IN_PHASES(quantise_tile, device_tile, quantise_shared, quantise_own, 3)

/* ---- residuals ---- */

#define RESIDUAL_TURNS 16u /* per block, so that its bins are seldom zeroed and added */

typedef struct residual_shared {
    uint32_t bin[DEVICE_BINS];
} residual_shared;

DEVICE_FN uint32_t residual_bin(const device_residuals *r, float residual) {
    float at = scalar_magnitude(residual) * r->per_unit, last = (float)r->max;
    return (uint32_t)(int32_t)(at < last ? at : last);
}

DEVICE_FN void residual_turn(const place *at, const device_residuals *r, residual_shared *s) {
    const device_tile *t = &r->tile;
    lattice_four f = lattice_four_of(at, t->count, t->columns, t->phase), here = f;
    four_floats now = load_four_floats(t->now, &f), parent_values = load_four_floats(t->parent_values, &f),
                low = tile_low_four(t, &f);
    UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {
        if (j < f.n) {
            now.at[j] = tile_residual(t, &here, now.at[j], parent_values.at[j], low.at[j]);
            if (r->bin) {
                add_u32(&s->bin[residual_bin(r, now.at[j])], 1);
            }
            lattice_next(&here, t->columns);
        }
    }
    if (r->to) {
        store_four_floats(r->to, &f, &now);
    }
}

DEVICE_FN void residual_tile(const place *at, const device_residuals *r, residual_shared *s,
                             quantise_own *own, int phase) {
    (void)own;
    if (phase == 1) {
        place turn = *at;
        for (uint32_t i = 0; i < RESIDUAL_TURNS; i++) {
            turn.block = at->block * RESIDUAL_TURNS + i;
            residual_turn(&turn, r, s);
        }
        return;
    }
    for (uint32_t i = at->thread; i < DEVICE_BINS && r->bin; i += LAUNCH_THREADS) {
        if (phase == 0) {
            s->bin[i] = 0;
        } else if (s->bin[i]) {
            add_u32(&r->bin[i], s->bin[i]);
        }
    }
}
KERNEL_IN_PHASES(residual_tile, device_residuals, residual_shared, quantise_own, 3)

DEVICE_FN void gather_slices(const place *at, const device_gathering *g) {
    const device_slice *p = &g->slice[at->block];
    for (uint32_t i = at->thread; i < p->n; i += LAUNCH_THREADS) {
        g->to[p->to + i] = g->from[p->first + i];
    }
}
KERNEL(gather_slices, device_gathering)

/* ---- factors ---- */

#define ROUND_EACH 16u /* elements per thread */

/* A span is a component. */
DEVICE_FN void round_factor(const place *at, const device_rounding *r) {
    uint64_t first = (uint64_t)at->block * ROUND_EACH * LAUNCH_THREADS + at->thread;
    float *component = r->at + at->span * r->n;
    const double scale = r->scale[at->span];
    int32_t largest = 0;
    for (uint32_t j = 0; j < ROUND_EACH; j++) {
        uint64_t i = first + j * LAUNCH_THREADS;
        if (i < r->n) {
            double v = (double)component[i] * scale, size = v < 0 ? -v : v;
            int32_t magnitude = (int32_t)((size < r->max ? size : r->max) + r->add);
            component[i] = (float)((double)(v < 0 ? -magnitude : magnitude) / scale);
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    if (largest) {
        raise_u32(&r->largest[at->span], (uint32_t)largest);
    }
}
KERNEL(round_factor, device_rounding)

/* ---- packing for the host ---- */

#define PACK_EACH 16u /* integers per word */

typedef struct ALIGNED(16) sixteen_bytes {
    int8_t at[PACK_EACH];
} sixteen_bytes;

/*
 * Numbers of wide integers: of each thread; later of the threads before it. A block reserves room for all of
 * its wide integers at once, as nearly all integers may be wide.
 */
typedef struct pack_shared {
    uint32_t others[LAUNCH_THREADS];
    uint64_t first;
} pack_shared;

typedef struct pack_own {
    sixteen_bytes q8;
    uint32_t others;
} pack_own;

DEVICE_FN uint32_t pack_code(int32_t q) {
    return q == 0 ? 0 : q == 1 ? 1 : q == -1 ? 2 : 3;
}

DEVICE_FN void pack_load(sixteen_bytes *q8, const device_packing *p, uint64_t first) {
    uint32_t n = p->count - first < PACK_EACH ? (uint32_t)(p->count - first) : PACK_EACH;
    if (n == PACK_EACH && (uintptr_t)p->q8 % PACK_EACH == 0) {
        *q8 = *(const sixteen_bytes *)(const void *)(p->q8 + first);
        return;
    }
    UNROLL for (uint32_t j = 0; j < PACK_EACH; j++) {
        q8->at[j] = j < n ? p->q8[first + j] : 0;
    }
}

DEVICE_FN void pack_word(const device_packing *p, uint64_t word, pack_own *own) {
    uint32_t bits = 0;
    own->others = 0;
    if (word * PACK_EACH >= p->count) {
        return;
    }
    pack_load(&own->q8, p, word * PACK_EACH);
    UNROLL for (uint32_t j = 0; j < PACK_EACH; j++) {
        uint32_t code = pack_code(own->q8.at[j]);
        bits |= code << (2 * j);
        own->others += code == 3;
    }
    p->words[word] = bits;
}

DEVICE_FN void pack_room(const device_packing *p, pack_shared *s) {
    uint32_t before = 0;
    for (uint32_t i = 0; i < LAUNCH_THREADS; i++) {
        uint32_t own = s->others[i];
        s->others[i] = before;
        before += own;
    }
    s->first = before ? count_u64(p->wide_count, before) : 0;
}

DEVICE_FN void pack_others(const device_packing *p, uint64_t word, uint64_t to, const pack_own *own) {
    if (own->others == 0 || to >= p->capacity) {
        return;
    }
    UNROLL for (uint32_t j = 0; j < PACK_EACH; j++) {
        int32_t q = own->q8.at[j];
        if (pack_code(q) == 3 && to < p->capacity) {
            p->wide[to].at = (uint32_t)(word * PACK_EACH + j);
            p->wide[to].q = q;
            to++;
        }
    }
}

DEVICE_FN void pack_q8(const place *at, const device_packing *p, pack_shared *s, pack_own *own, int phase) {
    uint64_t word = (uint64_t)at->block * LAUNCH_THREADS + at->thread;
    if (phase == 0) {
        pack_word(p, word, own);
        s->others[at->thread] = own->others;
    } else if (phase == 1 && at->thread == 0) {
        pack_room(p, s);
    } else if (phase == 2) {
        pack_others(p, word, s->first + s->others[at->thread], own);
    }
}
KERNEL_IN_PHASES(pack_q8, device_packing, pack_shared, pack_own, 3)

/* ---- unpacking from the host ---- */

/* Returns the integer of `width` bits from bit `at` of a lane on. low, high: the lane's words that contain it. */
DEVICE_FN int32_t unpack_one(int32_t low, int32_t high, uint32_t at, uint32_t width) {
    uint64_t lane = (uint64_t)(uint32_t)high << 32 | (uint32_t)low;
    return (int32_t)((uint32_t)(lane >> at) << (32 - width)) >> (32 - width);
}

/* width: output, the width of the group. */
DEVICE_FN four_integers unpack_four(const uint32_t *packed, const lattice_four *f, uint32_t *width) {
    four_integers q = {{0, 0, 0, 0}}, low, high = {{0, 0, 0, 0}};
    const uint32_t head = f->n ? packed[f->first / DEVICE_GROUP] : 0;
    const uint32_t bits = head & ((1u << DEVICE_WIDTH_BITS) - 1), at = f->first % DEVICE_GROUP / 4 * bits;
    const four_integers *words =
        (const four_integers *)(const void *)packed + (head >> DEVICE_WIDTH_BITS) + at / 32;
    *width = bits;
    if (bits == 0) {
        return q;
    }
    low = words[0];
    if (at % 32 + bits > 32) {
        high = words[1];
    }
    UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {
        q.at[j] = unpack_one(low.at[j], high.at[j], at % 32, bits);
    }
    return q;
}

/* Returns the integers of a thread, from bytes or from packed groups. */
DEVICE_FN four_integers tile_integers(const int8_t *q8, const uint32_t *packed, const lattice_four *f,
                                      uint32_t *width) {
    four_bytes bytes = load_four_bytes(q8, f);
    four_integers q;
    *width = 8;
    if (packed) {
        return unpack_four(packed, f, width);
    }
    UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {
        q.at[j] = bytes.at[j];
    }
    return q;
}

/* ---- values of a tile ---- */

DEVICE_FN void move_tile(const place *at, const device_tile *t) {
    lattice_four f = lattice_four_of(at, t->count, t->columns, t->phase), here = f;
    four_floats values = load_four_floats(t->parent_values, &f), low = tile_low_four(t, &f);
    uint32_t width;
    four_integers q = tile_integers(t->q8, t->packed, &f, &width);
    UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {
        if (j < f.n) {
            float step = tile_step(t, &here);
            float level = scalar_level(q.at[j], t->offset[0], t->offset[1], t->offset[2]);
            int32_t units = scalar_add(tile_low(t, low.at[j], step), scalar_units(level * step));
            values.at[j] = scalar_move(values.at[j], units, t->unit, t->per_unit);
            lattice_next(&here, t->columns);
        }
    }
    store_four_floats(t->values, &f, &values);
}
KERNEL(move_tile, device_tile)

/* ---- second moments ---- */

DEVICE_FN int32_t levels_offset(const device_levels *t, const lattice_four *f) {
    return (t->row ? t->row[f->row] : 0) + (t->column ? t->column[f->column] : 0);
}

/* kernels.level_quantise, without a parent. */
DEVICE_FN int32_t quantise_level(const device_levels *t, float now, int32_t offset) {
    int32_t to = scalar_level_of(now), start = t->birth + offset;
    float distance = (float)(to - start) * (1.0f / (float)t->step);
    int32_t steps = (int32_t)(scalar_magnitude(distance) + (1.0f - t->up));
    steps = distance < 0.0f ? -steps : steps;
    return to ? steps : LEVEL_ZERO;
}

/* The rule of engine/lossy/exceptions.c. */
DEVICE_FN bool levels_keep(const device_levels *t, float now) {
    bool finite = (scalar_bits(now) & 0x7f800000u) != 0x7f800000u;
    return scalar_magnitude(now) > t->exceptions.above || !(finite && now >= 0.0f);
}

DEVICE_FN void quantise_levels(const place *at, const device_levels *t) {
    lattice_four f = lattice_four_of(at, t->count, t->columns, t->phase), here = f;
    four_floats now = load_four_floats(t->now, &f);
    four_bytes q8 = {{0, 0, 0, 0}};
    uint32_t misfits = 0;
    UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {
        if (j < f.n) {
            int32_t q = quantise_level(t, now.at[j], levels_offset(t, &here));
            bool fits = (q > -128 && q < 128) || q == LEVEL_ZERO;
            if (t->exceptions.count && ((!fits && t->q8) || levels_keep(t, now.at[j]))) {
                keep_one(&t->exceptions, f.first + j);
                fits = true;
                q = 0;
            }
            q8.at[j] = (int8_t)(q == LEVEL_ZERO ? DEVICE_LEVEL_ZERO : fits ? q : 0);
            misfits += !fits && t->q8;
            lattice_next(&here, t->columns);
        }
    }
    if (t->q8) {
        store_four_bytes(t->q8, &f, &q8);
    }
    if (misfits) {
        add_u64(t->misfits, misfits);
    }
}
KERNEL(quantise_levels, device_levels)

DEVICE_FN void move_levels(const place *at, const device_levels *t) {
    lattice_four f = lattice_four_of(at, t->count, t->columns, t->phase), here = f;
    uint32_t width;
    four_integers integers = tile_integers(t->q8, t->packed, &f, &width);
    const int32_t zero = width ? -(int32_t)(1u << (width - 1)) : 1;
    four_floats values = {{0, 0, 0, 0}};
    UNROLL for (uint32_t j = 0; j < LATTICE_EACH; j++) {
        if (j < f.n) {
            int32_t q = integers.at[j] == zero ? LEVEL_ZERO : integers.at[j];
            int32_t level = scalar_level_apply(t->birth, q, levels_offset(t, &here), t->birth, t->step);
            values.at[j] = scalar_float((uint32_t)level << LEVEL_SHIFT);
            lattice_next(&here, t->columns);
        }
    }
    store_four_floats(t->values, &f, &values);
}
KERNEL(move_levels, device_levels)

#endif
