#include "tests/support/lattices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu.h"
#include "tests/support/xorshift.h"

#define GUARD 0xa5

static void require(bool holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "a lossy block: %s\n", what);
        abort();
    }
}

int32_t lattices_integer(const lattice_block *b, uint64_t i) {
    return b->q ? b->q[i] : (b->q8 ? b->q8[i] : 0);
}

static bool same_array(const int32_t *a, const int32_t *b, size_t n) {
    return !a == !b && (!a || memcmp(a, b, n * sizeof(*a)) == 0);
}

bool lattices_same_columns(const lattice_columns *a, const lattice_columns *b) {
    return a->columns == b->columns && a->rank == b->rank && same_array(a->step, b->step, a->columns) &&
           (a->rank == 0 || (same_array(a->shift, b->shift, a->rank) &&
                             same_array(a->factor, b->factor, a->columns * a->rank)));
}

static bool manifest_set_grid(const lattice_block *b) {
    return b->row || b->factor || b->shared || b->own.step || b->own.rank;
}

const lattice_columns *lattices_rows(const lattice_block *b) {
    static const int32_t none[LATTICE_MAX_RANK];
    static lattice_columns rows;
    rows = (lattice_columns){.columns = lattice_rows(b),
                             .step = b->row,
                             .rank = b->factor ? b->own.rank : 0,
                             .shift = none,
                             .factor = b->factor};
    return b->shared_rows ? &rows : NULL;
}

bool lattices_same(const lattice_block *a, const lattice_block *b) {
    if (a->map != b->map || a->count != b->count || a->step != b->step || a->exponent != b->exponent ||
        a->birth != b->birth || memcmp(a->offset, b->offset, 3) != 0 || a->shared != b->shared ||
        a->shared_rows != b->shared_rows || a->exceptions != b->exceptions ||
        manifest_set_grid(a) != manifest_set_grid(b)) {
        return false;
    }
    for (uint64_t i = 0; i < a->count; i++) {
        if (lattices_integer(a, i) != lattices_integer(b, i)) {
            return false;
        }
    }
    if (a->exceptions &&
        (memcmp(a->exception_at, b->exception_at, a->exceptions * sizeof(uint32_t)) != 0 ||
         memcmp(a->exception_bits, b->exception_bits, a->exceptions * sizeof(uint32_t)) != 0)) {
        return false;
    }
    return !manifest_set_grid(a) ||
           (a->columns == b->columns && a->phase == b->phase && same_array(a->row, b->row, lattice_rows(a)) &&
            lattices_same_columns(&a->own, &b->own) &&
            (!a->factor || a->low_rank_exponent == b->low_rank_exponent) &&
            same_array(a->factor, b->factor, lattice_rows(a) * a->own.rank));
}

/* A payload of the block, and what decoded blocks point into. */
typedef struct coded_block {
    bytes payload;
    lattice_scratch to, from;
    symbols_workspace *work;
} coded_block;

static void code(coded_block *c, const lattice_block *b, lattice_effort effort) {
    *c = (coded_block){.work = NULL};
    require(symbols_workspace_create(&c->work, NULL) == CKD_OK, "no memory");
    require(lattice_encode(&c->payload, b, effort, &c->to, c->work, NULL) == CKD_OK, "cannot be coded");
}

static lattice_block decode(coded_block *c, const lattice_block *b, const lattice_columns *shared,
                            bool as_masks) {
    lattice_block again;
    const lattice_payload from = {c->payload.data, c->payload.size,  b->count,
                                  shared,          lattices_rows(b), as_masks};
    require(lattice_decode(&again, &from, &c->from, c->work, NULL) == CKD_OK, "what was coded is refused");
    return again;
}

static void coded_free(coded_block *c) {
    bytes_free(&c->payload);
    symbols_workspace_free(c->work);
    lattice_scratch_free(&c->to);
    lattice_scratch_free(&c->from);
}

static void check_again(const lattice_block *b, const lattice_columns *shared) {
    for (int effort = LATTICE_FAST; effort <= LATTICE_SMALL; effort++) {
        coded_block c;
        code(&c, b, (lattice_effort)effort);
        lattice_block again = decode(&c, b, shared, false);
        require(lattices_same(b, &again), "it does not come back");
        coded_free(&c);
    }
}

/* Rebuilds the values of a block from `parent` with the kernels `k`, with guards around them. */
static uint8_t *rebuild(ckd_status *status, const lattice_block *b, ckd_dtype dtype, const void *parent,
                        const kernels *k) {
    size_t size = b->count * ckd_dtype_size(dtype);
    uint8_t *values = malloc(size + 2);
    lattice_work work = {0};
    require(values != NULL, "no memory");
    memset(values, GUARD, size + 2);
    if (parent) {
        memcpy(values + 1, parent, size); /* unaligned on purpose */
    }
    const lattice_target target = {values + 1, dtype, parent != NULL};
    *status = lattice_rebuild_values(&target, b, &work, k, NULL);
    require(*status == CKD_OK || *status == CKD_E_CORRUPT, "another error");
    require(values[0] == GUARD && values[size + 1] == GUARD, "written beyond its values");
    lattice_work_free(&work);
    return values;
}

/* Masks give the values that integers give. */
static void check_masks(const lattice_block *wide, const lattice_columns *shared, ckd_dtype dtype,
                        const void *parent, const uint8_t *values) {
    const kernels *all[KERNELS_CPU_BEST];
    size_t backends = kernels_cpu_all(all), size = wide->count * ckd_dtype_size(dtype);
    for (size_t i = 0; i < backends; i++) {
        coded_block c;
        ckd_status status;
        code(&c, wide, LATTICE_FAST);
        lattice_block again = decode(&c, wide, shared, true);
        uint8_t *moved = rebuild(&status, &again, dtype, parent, all[i]);
        require(status == CKD_OK && memcmp(moved, values, size + 2) == 0, "masks and integers differ");
        free(moved);
        coded_free(&c);
    }
}

ckd_status lattices_check(const lattice_block *b, const lattice_columns *shared, ckd_dtype dtype,
                          const void *parent) {
    lattice_block wide = *b;
    int32_t *q = malloc(b->count * sizeof(*q) + 1);
    require(q != NULL, "no memory");
    for (uint64_t i = 0; i < b->count; i++) {
        q[i] = lattices_integer(b, i);
    }
    wide.q8 = NULL;
    wide.q = q;
    check_again(&wide, shared);
    const kernels *all[KERNELS_CPU_BEST];
    size_t backends = kernels_cpu_all(all), size = b->count * ckd_dtype_size(dtype);
    ckd_status status, other;
    uint8_t *first = rebuild(&status, b, dtype, parent, all[0]);
    for (size_t i = 0; i < backends; i++) {
        for (int widened = 0; widened < 2; widened++) {
            uint8_t *values = rebuild(&other, widened ? &wide : b, dtype, parent, all[i]);
            require(other == status && (status != CKD_OK || memcmp(values, first, size + 2) == 0),
                    "backends differ");
            free(values);
        }
    }
    if (status == CKD_OK) {
        check_masks(&wide, shared, dtype, parent, first);
    }
    free(first);
    free(q);
    return status;
}

/* ---- random blocks ---- */

static int32_t between(int32_t least, int32_t most) {
    return least + (int32_t)(next_random() % (uint64_t)(most - least + 1));
}

static int32_t *some(uint64_t n, int32_t least, int32_t most) {
    int32_t *out = malloc(n * sizeof(*out) + 1);
    require(out != NULL, "no memory");
    for (uint64_t i = 0; i < n; i++) {
        out[i] = between(least, most);
    }
    return out;
}

static void make_integers(lattices_made *m, unsigned kind, bool levels) {
    static const int32_t most[] = {0, 2, 127, 32767, INT32_MAX};
    for (uint64_t i = 0; i < m->b.count; i++) {
        int32_t v = kind == LATTICES_WIDE ? (int32_t)((uint32_t)next_random() >> next_random() % 32)
                                          : between(-most[kind], most[kind]);
        bool zero = kind == LATTICES_FEW ? next_random() % 20 != 0 : next_random() % 4 == 0;
        m->q[i] = zero ? 0 : v;
        if (levels && kind != LATTICES_NONE && next_random() % 50 == 0) {
            m->q[i] = INT32_MIN;
        }
    }
}

static void make_exceptions(lattices_made *m) {
    m->at = malloc(m->b.count * sizeof(*m->at));
    m->bits = malloc(m->b.count * sizeof(*m->bits));
    require(m->at && m->bits, "no memory");
    for (uint32_t i = 0; i < m->b.count; i++) {
        if (i + 1 == m->b.count || next_random() % 40 == 0) {
            m->at[m->b.exceptions] = i;
            m->bits[m->b.exceptions++] = (uint32_t)(next_random() & 0xffff);
        }
    }
    m->b.exception_at = m->at;
    m->b.exception_bits = m->bits;
}

void lattices_make(lattices_made *out, unsigned forms, unsigned kind, uint64_t count, uint64_t columns,
                   uint64_t phase) {
    *out = (lattices_made){.b = {.count = count, .columns = columns, .phase = phase}};
    lattice_block *b = &out->b;
    bool levels = forms & LATTICES_LEVELS;
    uint64_t rows = lattice_rows(b);
    uint32_t rank = forms & LATTICES_FACTOR && !levels ? 1 + (uint32_t)(next_random() % columns % 6) : 0;
    b->map = levels ? LATTICE_LEVELS : LATTICE_LINEAR;
    b->step = levels ? between(1, 40) : between(-20, 40);
    b->exponent = levels ? 0 : between(-30, 3);
    b->birth = levels ? between(1, 2039) : 0;
    b->own.columns = columns;
    b->shared = forms & LATTICES_SHARED;
    for (int i = 0; i < 3 && !levels; i++) {
        b->offset[i] = (uint8_t)next_random();
    }
    b->q = out->q = some(count, 0, 0);
    make_integers(out, kind, levels);
    b->row = out->row = forms & LATTICES_ROWS ? some(rows, -12, 12) : NULL;
    b->own.step = out->step = forms & LATTICES_STEPS ? some(columns, -12, 12) : NULL;
    if (rank) {
        b->own.rank = rank;
        b->own.shift = out->shift = some(rank, 0, 5);
        b->own.factor = out->columns_factor = some(columns * rank, -90, 90);
        b->factor = out->factor = some(rows * rank, -20, 20);
        b->low_rank_exponent = between(-12, 0);
    }
    if (forms & LATTICES_EXCEPTIONS) {
        make_exceptions(out);
    }
    b->shared_rows = b->shared && forms & LATTICES_SHARED_ROWS && (b->row || b->factor);
}

void lattices_made_free(lattices_made *m) {
    void *all[] = {m->q, m->row, m->step, m->shift, m->columns_factor, m->factor, m->at, m->bits};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        free(all[i]);
    }
}
