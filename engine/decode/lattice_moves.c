/*
 * Lossy blocks in which few elements move. Their integers come as masks; elements that move are gathered, moved as
 * lattice_rebuild moves them, and put back. So the time for a link of a chain depends on its changes, not on the size
 * of its block.
 */
#include <string.h>

#include "engine/decode/internal.h"

#define MOVES 512 /* gathered at a time */

/* Some elements that move: their positions in the block, values, and steps. */
typedef struct moves {
    uint32_t at[MOVES];
    float values[MOVES], steps[MOVES];
    uint16_t halves[MOVES]; /* of 16-bit dtypes: the values as stored */
    size_t count;
    const int8_t *q;
} moves;

/* ---- elements that stay ---- */

/* One bit in each of four 16-bit lanes: the highest, set where the value is NaN. */
static uint64_t nan_lanes(uint64_t four, ckd_dtype dtype) {
    const uint64_t each = UINT64_C(0x0001000100010001);
    uint64_t beyond_infinity = each * (dtype == CKD_F16 ? 0x8000u - 0x7c01u : 0x8000u - 0x7f81u);
    return ((four & each * 0x7fffu) + beyond_infinity) & each * 0x8000u;
}

/*
 * Does to the values what a conversion to floats and back would do: NaNs become the dtype's quiet NaN, and nothing else
 * changes.
 */
static void settle_nans(uint8_t *values, ckd_dtype dtype, size_t n) {
    const uint16_t quiet = dtype == CKD_F16 ? 0x7e00 : 0x7fc0;
    for (size_t i = 0; i < n; i += 4) {
        size_t left = n - i < 4 ? n - i : 4;
        uint16_t four[4] = {0};
        uint64_t lanes;
        memcpy(four, values + 2 * i, 2 * left);
        memcpy(&lanes, four, sizeof(lanes));
        if (!nan_lanes(lanes, dtype)) {
            continue;
        }
        for (size_t j = 0; j < left; j++) {
            four[j] = nan_lanes(four[j], dtype) ? quiet : four[j];
        }
        memcpy(values + 2 * i, four, 2 * left);
    }
}

/* ---- elements that move ---- */

/* The steps of the elements, each its row's times its column's. Returns the run of the whole list. */
static lattice_run run_of(moves *m, const lattice_block *b, const lattice_work *w, uint64_t *row) {
    lattice_run run = lattice_row_run(b, w, 0);
    const float *column_step = run.column_step;
    if (!column_step && !b->row) {
        return run;
    }
    uint64_t begin = *row * b->columns, end = begin + b->columns; /* of the row, counted with the phase */
    float row_step = lattice_row_run(b, w, *row).row_step;
    for (size_t i = 0; i < m->count; i++) {
        uint64_t at = b->phase + m->at[i];
        if (at >= end) {
            *row = at / b->columns;
            begin = *row * b->columns;
            end = begin + b->columns;
            row_step = lattice_row_run(b, w, *row).row_step;
        }
        m->steps[i] = column_step ? column_step[at - begin] * row_step : row_step;
    }
    run.row_step = 1;
    run.column_step = m->steps;
    return run;
}

static void move(const lattice_target *to, moves *m, const lattice_run *run, const kernels *k) {
    uint8_t *values = to->values;
    if (to->dtype == CKD_F32) {
        for (size_t i = 0; i < m->count; i++) {
            memcpy(&m->values[i], values + 4 * (size_t)m->at[i], 4);
        }
        k->lattice_apply_q8(m->values, m->q, m->count, run);
        for (size_t i = 0; i < m->count; i++) {
            memcpy(values + 4 * (size_t)m->at[i], &m->values[i], 4);
        }
        return;
    }
    for (size_t i = 0; i < m->count; i++) {
        memcpy(&m->halves[i], values + 2 * (size_t)m->at[i], 2);
    }
    k->widen(m->values, to->dtype, m->halves, m->count);
    k->lattice_apply_q8(m->values, m->q, m->count, run);
    k->cast(to->dtype, m->halves, CKD_F32, m->values, m->count);
    for (size_t i = 0; i < m->count; i++) {
        memcpy(values + 2 * (size_t)m->at[i], &m->halves[i], 2);
    }
}

/* Adds the elements of 64 integers, from `first` on, whose bits are set. */
static void gather(moves *m, uint64_t set, size_t first) {
    for (; set; set &= set - 1) {
        m->at[m->count++] = (uint32_t)(first + (unsigned)__builtin_ctzll(set));
    }
}

ckd_status lattice_move_values(const lattice_target *to, const lattice_block *b, lattice_work *w,
                               const kernels *k, ckd_error *err) {
    size_t size = ckd_dtype_size(to->dtype), groups = (size_t)(b->count + 7) / 8;
    moves m;
    uint64_t row = 0;
    ckd_status status = b->masks ? lattice_steps(b, w, err) : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    if (!to->has_parent) {
        memset(to->values, 0, (size_t)b->count * size);
    } else if (size == 2) {
        settle_nans(to->values, to->dtype, (size_t)b->count);
    }
    m.count = 0;
    m.q = b->others;
    for (size_t g = 0; b->masks && g < groups; g += 8) {
        uint8_t eight[8] = {0};
        memcpy(eight, b->masks + g, groups - g < 8 ? groups - g : 8);
        gather(&m, load_le64(eight), 8 * g);
        if (m.count > MOVES - 64 || g + 8 >= groups) {
            lattice_run run = run_of(&m, b, w, &row);
            move(to, &m, &run, k);
            m.q += m.count;
            m.count = 0;
        }
    }
    return CKD_OK;
}
