/*
 * Dense symbol streams for devices: plans one from a device's counts, and takes its tables apart so that a device can
 * write or read the payload.
 */
#include "codec/entropy/entropy.h"

#include <string.h>

#include "codec/entropy/symbols_work.h"

/* Largest size of a stream in bytes. No integer takes more bits than its own plus those of a state. */
#define SYMBOLS_PARTS_MAX (SYMBOLS_MAX_HEADER + (size_t)SYMBOLS_MAX_COUNT * 10)

/*
 * Returns true if symbols_plan might choose another kind of stream. It tries one if few integers are nonzero. A centre
 * hides the zeros of bytes from the count, so for bytes it may try one too.
 */
static bool may_be_other(const symbols_slot *dense, const symbols_counts *c, bool by_context) {
    bool few = dense->zeros >= c->n - c->n / SYMBOLS_CHANGES_WORTH;
    return c->n >= SYMBOLS_FEW_MIN && (c->centre ? c->width == 1 && !by_context : few);
}

bool symbols_plan_counts(symbols_workspace *w, int slot, const symbols_counts *counts, size_t *planned) {
    symbols_plan_slot *p = &w->plan[slot];
    symbols_groups groups;
    p->is_framed = p->is_encoded = false;
    *planned = symbols_counted_plan(w, &p->dense, &groups, counts);
    *planned += *planned / 1024;
    bool dense = !may_be_other(&p->dense, counts, groups.count > 1);
    p->dense.count = dense ? counts->n : 0;
    return dense;
}

/* ---- in SPLIT ---- */

symbols_lines symbols_lines_of(const symbols_grid *grid, size_t n) {
    symbols_lines lines = {0, 0, 0};
    bool worth = symbols_set_grid(&lines.columns, &lines.phase, &lines.rows, grid, n, n);
    return worth ? lines : (symbols_lines){0, 0, 0};
}

bool symbols_levels_of(uint8_t *levels, symbols_workspace *w, const symbols_lines *lines,
                       const uint64_t *sums, uint64_t squares, size_t n) {
    symbols_frame *f = &w->plan[0].frame;
    uint32_t all = lines->rows + lines->columns;
    f->columns = lines->columns;
    f->phase = lines->phase;
    f->rows = lines->rows;
    for (uint32_t i = 0; i < all; i++) {
        w->level_sums.sum[i] = (uint32_t)sums[i];
        w->level_sums.count[i] = (uint32_t)(sums[i] >> 32);
    }
    if (!symbols_choose_counted_levels(f, &w->level_sums, squares, n)) {
        return false;
    }
    memcpy(levels, f->level, all);
    return true;
}

size_t symbols_plan_split(symbols_workspace *w, int slot, const symbols_counts *counts,
                          const symbols_splitting *split, const symbols_lines *lines, const uint8_t *levels) {
    symbols_plan_slot *p = &w->plan[slot];
    symbols_frame *f = &p->frame;
    p->is_encoded = false;
    f->columns = f->rows = 0;
    if (levels) {
        f->columns = lines->columns;
        f->phase = lines->phase;
        f->rows = lines->rows;
        memcpy(f->level, levels, f->rows + f->columns);
    }
    size_t planned = symbols_counted_framed_plan(w, &p->dense, f, &p->is_framed, counts, split);
    planned += symbols_plan_frame(w, p);
    return planned + planned / 1024;
}

/* ---- tables ---- */

static void take_apart(symbols_parts *parts, const symbols_header *h, unsigned width) {
    uint32_t at = 0;
    parts->width = width;
    parts->tables = h->tables;
    parts->log = h->log;
    parts->lanes = 1u << h->lanes_log;
    parts->contexts = h->contexts;
    symbols_map_contexts(parts->table_of, h);
    for (unsigned t = 0; t < h->tables; t++) {
        uint32_t before = 0;
        parts->first[t] = at;
        for (unsigned s = h->table[t].first; s <= h->table[t].last; s++) {
            uint16_t states = h->table[t].counts[s];
            if (states) {
                symbols_meaning m = symbols_mean(h, width, t, s);
                parts->symbol[at++] = (symbols_part){m.base, before, states, (uint8_t)s, (uint8_t)m.low};
                before += states;
            }
        }
    }
    parts->first[h->tables] = at;
}

void symbols_parts_planned(symbols_parts *parts, const symbols_workspace *w, int slot) {
    const symbols_slot *p = &w->plan[slot].dense;
    take_apart(parts, &p->header, p->width);
    parts->header = symbols_header_size(&p->header, p->width);
    parts->bound = p->bound - parts->header;
    parts->shift = p->shift;
    for (unsigned t = 0; t < parts->tables; t++) {
        uint8_t place[SYMBOLS_ALPHABET] = {0};
        for (uint32_t i = parts->first[t]; i < parts->first[t + 1]; i++) {
            place[parts->symbol[i].symbol] = (uint8_t)(i - parts->first[t]);
        }
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            parts->own[t][s] = place[p->remap[t][s]];
        }
    }
}

void symbols_parts_header(const symbols_workspace *w, int slot, uint8_t *to) {
    const symbols_slot *p = &w->plan[slot].dense;
    symbols_header_write(&p->header, p->width, to);
}

ckd_status symbols_parts_read(symbols_parts *parts, bool *dense, unsigned width, const void *from,
                              size_t size, ckd_error *err) {
    symbols_header h;
    const uint8_t *stream = from;
    *dense = size == 0 || stream[0] < SYMBOLS_SPARSE;
    ckd_status status = *dense ? symbols_header_read(&h, width, from, size, &parts->header, err) : CKD_OK;
    if (status != CKD_OK || !*dense) {
        return status;
    }
    if (size == parts->header || stream[size - 1] == 0 || size > SYMBOLS_PARTS_MAX) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a symbol stream has no end");
    }
    parts->bits =
        (uint32_t)(8 * (size - parts->header - 1)) + 31u - (uint32_t)__builtin_clz(stream[size - 1]);
    take_apart(parts, &h, width);
    return CKD_OK;
}
