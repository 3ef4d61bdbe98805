/* Computes which elements a rank holds, from the cuts of a dimension, parts side by side, and padding at the end. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/layout/layout.h"
#include "cli/files/files.h"

#define STRETCHES_MAX (UINT64_C(1) << 22)

size_t layout_tensors_of(const layout_rule *rule) {
    return rule->apart ? rule->part_count : 1;
}

uint32_t layout_main_dim(const layout_rule *rule, uint32_t ndim) {
    return rule->cut_count ? cli_dim_of(rule->cuts[rule->main_cut].dim, ndim) : 0;
}

void layout_share_free(layout_share *share) {
    free(share->stretches);
    *share = (layout_share){0};
}

/* ---- one cut ---- */

typedef struct span {
    uint64_t offset, length;
    uint32_t copy, copies;
} span;

typedef struct cutting {
    const layout *l;
    const layout_rule *rule;
    const layout_cut *cut;
    uint32_t dim, place, places;
    ckd_error *err;
} cutting;

static ckd_status cut_even(span *out, const cutting *c, uint64_t total, uint64_t unit, const char *what) {
    uint64_t places = c->places, units = total / unit;
    if (total % unit || units % places) {
        char in_units[48] = "";
        if (unit > 1) {
            snprintf(in_units, sizeof(in_units), ", in units of %" PRIu64 ",", unit);
        }
        return layout_error(c->l, c->rule->line, c->err, CKD_E_MISMATCH,
                            "%s%sdimension %u has %" PRIu64
                            " elements, which%s cannot be cut evenly into %" PRIu64
                            "; cut=chunk gives the last ones less",
                            what, *what ? ": " : "", c->dim, total, in_units, places);
    }
    *out = (span){units / places * unit * c->place, units / places * unit, 0, 1};
    return CKD_OK;
}

/* As torch.chunk: ceil(units / places) each, until nothing is left. */
static span cut_chunk(const cutting *c, uint64_t total, uint64_t unit) {
    uint64_t places = c->places, units = total / unit + (total % unit != 0);
    uint64_t length = (units / places + (units % places != 0)) * unit; /* at most total + unit */
    uint64_t first = length && c->place < (total + length - 1) / length ? length * c->place : total;
    return (span){first, total - first < length ? total - first : length, 0, 1};
}

/* With fewer units than places, neighbours share a unit. */
static ckd_status cut_repeat(span *out, const cutting *c, uint64_t total, uint64_t unit, const char *what) {
    uint64_t units = total / unit;
    if (units >= c->places || units == 0) {
        return cut_even(out, c, total, unit, what);
    }
    if (total % unit || c->places % units) {
        return layout_error(c->l, c->rule->line, c->err, CKD_E_MISMATCH,
                            "%s%sdimension %u has %" PRIu64 " elements, in units of %" PRIu64
                            ", which cannot be repeated evenly on %u places",
                            what, *what ? ": " : "", c->dim, total, unit, c->places);
    }
    uint32_t copies = c->places / (uint32_t)units;
    *out = (span){c->place / copies * unit, unit, c->place % copies, copies};
    return CKD_OK;
}

static ckd_status cut_sizes(span *out, const cutting *c, uint64_t total) {
    uint64_t all = 0, before = 0;
    for (uint32_t i = 0; i < c->places; i++) {
        before += i < c->place ? c->cut->sizes[i] : 0;
        all += c->cut->sizes[i];
    }
    if (all != total) {
        return layout_error(c->l, c->rule->line, c->err, CKD_E_MISMATCH,
                            "sizes= adds up to %" PRIu64 ", dimension %u has %" PRIu64 " elements", all,
                            c->dim, total);
    }
    *out = (span){before, c->cut->sizes[c->place], 0, 1};
    return CKD_OK;
}

static ckd_status cut_span(span *out, const cutting *c, layout_cut_kind kind, uint64_t total, uint64_t unit,
                           const char *what) {
    switch (kind) {
    case LAYOUT_SIZES:
        return cut_sizes(out, c, total);
    case LAYOUT_CHUNK:
        *out = cut_chunk(c, total, unit);
        return CKD_OK;
    case LAYOUT_REPEAT:
        return cut_repeat(out, c, total, unit, what);
    default:
        return cut_even(out, c, total, unit, what);
    }
}

/* ---- the main dimension ---- */

static ckd_status allocate_stretches(layout_share *s, uint64_t count, ckd_error *err) {
    s->stretches = count < STRETCHES_MAX ? calloc((size_t)count + 1, sizeof(*s->stretches)) : NULL;
    return s->stretches ? CKD_OK : cli_error_nomem(err);
}

static void add(layout_share *s, size_t part, span slice) {
    s->stretches[s->count++] = (layout_stretch){part, slice.offset, slice.length, slice.copy, slice.copies};
    s->lengths[s->dim] += slice.length;
}

/* A place's length is a multiple of pad; everything after the last element is padding. */
static ckd_status share_padded(layout_share *s, const cutting *c, uint64_t total) {
    uint64_t places = c->places, step, whole = 0;
    span slice = {0};
    if (c->cut->kind == LAYOUT_SIZES) {
        for (uint32_t i = 0; i < places; i++) {
            whole += c->cut->sizes[i];
        }
    } else if (__builtin_mul_overflow(c->rule->pad, c->cut->unit, &step) ||
               __builtin_mul_overflow(step, places, &step) || step > CKD_MAX_ELEMENTS) {
        whole = UINT64_MAX;
    } else {
        whole = (total / step + (total % step != 0)) * step;
    }
    if (whole < total || whole > 2 * CKD_MAX_ELEMENTS) {
        return layout_error(c->l, c->rule->line, c->err, CKD_E_MISMATCH,
                            "%" PRIu64 " elements cannot be padded that way", total);
    }
    ckd_status status = allocate_stretches(s, 2, c->err);
    THEN(status, cut_span(&slice, c, c->cut->kind, whole, 1, ""));
    if (status == CKD_OK) {
        uint64_t offset = slice.offset < total ? slice.offset : total;
        uint64_t real = slice.length < total - offset ? slice.length : total - offset;
        add(s, 0, (span){offset, real, 0, 1});
        add(s, LAYOUT_NONE, (span){0, slice.length - real, 0, 1});
    }
    return status;
}

/*
 * Takes each part's own share, one after the other. If parts are kept together, they are also consecutive in the
 * checkpoint's tensor.
 */
static ckd_status share_parts(layout_share *s, const cutting *c, const uint64_t *totals) {
    ckd_status status = allocate_stretches(s, c->rule->part_count, c->err);
    uint64_t before = 0;
    for (size_t i = 0; i < c->rule->part_count && status == CKD_OK; i++) {
        const layout_part *part = &c->rule->parts[i];
        uint64_t total = c->rule->apart ? totals[i]
                         : part->size   ? part->size
                                        : totals[0] / c->rule->part_count;
        span slice = {0};
        status = cut_span(&slice, c, part->kind, total, part->unit, part->name);
        if (status == CKD_OK) {
            slice.offset += before;
            add(s, c->rule->apart ? i : 0, slice);
        }
        before += c->rule->apart ? 0 : total;
    }
    return status;
}

static ckd_status check_groups(const cutting *c, const uint64_t *totals) {
    for (size_t i = 0; i < c->rule->part_count; i++) {
        if (totals[i] % c->rule->groups) {
            return layout_error(c->l, c->rule->line, c->err, CKD_E_MISMATCH,
                                "%s has %" PRIu64 " elements, which are not %" PRIu64 " groups",
                                c->rule->parts[i].name, totals[i], c->rule->groups);
        }
    }
    return CKD_OK;
}

/* Places the parts side by side, group by group; a place has whole groups. */
static ckd_status share_groups(layout_share *s, const cutting *c, const uint64_t *totals) {
    span slice = {0};
    ckd_status status = cut_span(&slice, c, c->cut->kind, c->rule->groups, 1, "groups");
    THEN(status, slice.length < STRETCHES_MAX
                     ? allocate_stretches(s, slice.length * c->rule->part_count, c->err)
                     : cli_error_nomem(c->err));
    for (uint64_t g = slice.offset; status == CKD_OK && g < slice.offset + slice.length; g++) {
        for (size_t i = 0; i < c->rule->part_count; i++) {
            uint64_t length = totals[i] / c->rule->groups;
            add(s, i, (span){g * length, length, 0, 1});
        }
    }
    return status;
}

/* With fewer groups than places, neighbours share a group. Each part of it is cut or repeated separately. */
static ckd_status share_one_group(layout_share *s, const cutting *c, const uint64_t *totals) {
    uint64_t groups = c->rule->groups;
    if (c->places % groups) {
        return layout_error(c->l, c->rule->line, c->err, CKD_E_MISMATCH,
                            "%" PRIu64 " groups cannot be shared evenly by %u places", groups, c->places);
    }
    cutting inside = *c;
    inside.places = c->places / (uint32_t)groups;
    inside.place = c->place % inside.places;
    ckd_status status = allocate_stretches(s, c->rule->part_count, c->err);
    for (size_t i = 0; i < c->rule->part_count && status == CKD_OK; i++) {
        const layout_part *part = &c->rule->parts[i];
        uint64_t length = totals[i] / groups;
        span slice = {0};
        status = cut_span(&slice, &inside, part->kind, length, part->unit, part->name);
        if (status == CKD_OK) {
            slice.offset += c->place / inside.places * length;
            add(s, i, slice);
        }
    }
    return status;
}

/* Checks that the rule's sizes equal the actual ones. */
static ckd_status check_totals(const cutting *c, const uint64_t *totals) {
    uint64_t sum = 0;
    for (size_t i = 0; i < c->rule->part_count; i++) {
        const layout_part *part = &c->rule->parts[i];
        sum += part->size;
        if (c->rule->apart && part->size && part->size != totals[i]) {
            return layout_error(c->l, c->rule->line, c->err, CKD_E_MISMATCH,
                                "%s has %" PRIu64 " elements along dimension %u, parts= says %" PRIu64,
                                part->name, totals[i], c->dim, part->size);
        }
    }
    if (c->rule->part_count && !c->rule->apart &&
        (sum ? sum != totals[0] : totals[0] % c->rule->part_count != 0)) {
        return layout_error(c->l, c->rule->line, c->err, CKD_E_MISMATCH,
                            "dimension %u has %" PRIu64 " elements, which do not match parts=", c->dim,
                            totals[0]);
    }
    if (c->rule->size && c->rule->size != totals[0]) {
        return layout_error(c->l, c->rule->line, c->err, CKD_E_MISMATCH,
                            "dimension %u has %" PRIu64 " elements, size= says %" PRIu64, c->dim, totals[0],
                            c->rule->size);
    }
    return CKD_OK;
}

static ckd_status share_main(layout_share *s, const cutting *c, const uint64_t *totals) {
    ckd_status status = check_totals(c, totals);
    if (status != CKD_OK) {
        return status;
    }
    if (c->rule->groups) {
        status = check_groups(c, totals);
        bool shared = c->rule->repeats && c->rule->groups < c->places;
        return status != CKD_OK ? status
               : shared         ? share_one_group(s, c, totals)
                                : share_groups(s, c, totals);
    }
    if (c->rule->part_count) {
        return share_parts(s, c, totals);
    }
    if (c->rule->padded) {
        return share_padded(s, c, totals[0]);
    }
    span slice = {0};
    status = allocate_stretches(s, 1, c->err);
    THEN(status, cut_span(&slice, c, c->cut->kind, totals[0], c->cut->unit, ""));
    if (status == CKD_OK) {
        add(s, 0, slice);
    }
    return status;
}

/* ---- all dimensions ---- */

/* Finds the dimension of a cut; no earlier cut may have it. */
static ckd_status find_dim(uint32_t *out, const layout *l, const layout_rule *rule, uint32_t number,
                           uint32_t ndim, ckd_error *err) {
    *out = cli_dim_of(rule->cuts[number].dim, ndim);
    if (*out == CKD_MAX_DIMS) {
        return layout_error(l, rule->line, err, CKD_E_MISMATCH,
                            "a tensor of %u dimensions has no dimension %d", ndim, rule->cuts[number].dim);
    }
    for (uint32_t i = 0; i < number; i++) {
        if (cli_dim_of(rule->cuts[i].dim, ndim) == *out) {
            return layout_error(l, rule->line, err, CKD_E_MISMATCH,
                                "of a tensor of %u dimensions, %d and %d are the same one", ndim,
                                rule->cuts[i].dim, rule->cuts[number].dim);
        }
    }
    return CKD_OK;
}

static ckd_status share_dims(layout_share *s, const layout *l, const layout_rule *rule,
                             const uint32_t at[LAYOUT_AXES], const uint64_t *totals, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < rule->cut_count && status == CKD_OK; i++) {
        const layout_cut *cut = &rule->cuts[i];
        cutting c = {l, rule, cut, 0, layout_place(&cut->over, l, at), cut->over.places, err};
        span slice = {0};
        status = find_dim(&c.dim, l, rule, i, s->ndim, err);
        if (status != CKD_OK) {
            return status;
        }
        if (i == rule->main_cut) {
            s->dim = c.dim;
            s->lengths[c.dim] = 0;
            status = share_main(s, &c, totals);
            continue;
        }
        status = cut_span(&slice, &c, cut->kind, s->lengths[c.dim], cut->unit, "");
        if (status == CKD_OK) {
            s->offsets[c.dim] = slice.offset;
            s->lengths[c.dim] = slice.length;
        }
    }
    if (status == CKD_OK && rule->cut_count == 0) {
        status = allocate_stretches(s, 1, err);
        uint64_t all = s->ndim ? s->lengths[0] : 1;
        s->lengths[0] = 0;
        if (status == CKD_OK) {
            add(s, 0, (span){0, all, 0, 1});
        }
    }
    return status;
}

ckd_status layout_share_make(layout_share *out, const layout *l, const layout_rule *rule,
                             const uint32_t at[LAYOUT_AXES], const layout_whole *whole, ckd_error *err) {
    *out = (layout_share){.ndim = whole->ndim};
    memcpy(out->lengths, whole->shape, whole->ndim * sizeof(*whole->shape));
    ckd_status status = share_dims(out, l, rule, at, whole->totals, err);
    if (status != CKD_OK) {
        layout_share_free(out);
    }
    return status;
}

/* Splits a common length among the parts that are separate tensors. */
static ckd_status split_total(uint64_t *totals, const layout *l, const layout_rule *rule, uint64_t whole,
                              ckd_error *err) {
    size_t count = layout_tensors_of(rule);
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        totals[i] = !rule->apart ? whole : rule->parts[i].size ? rule->parts[i].size : whole / count;
        sum += totals[i];
    }
    return sum == whole ? CKD_OK
                        : layout_error(l, rule->line, err, CKD_E_MISMATCH,
                                       "%" PRIu64 " elements do not match parts=", whole);
}

ckd_status layout_rank_shape(uint64_t lengths[CKD_MAX_DIMS], const layout *l, const layout_rule *rule,
                             const uint32_t at[LAYOUT_AXES], const layout_whole *whole, ckd_error *err) {
    uint32_t dim = layout_main_dim(rule, whole->ndim);
    uint64_t *totals = calloc(layout_tensors_of(rule), sizeof(*totals));
    layout_share share = {0};
    ckd_status status = totals ? CKD_OK : cli_error_nomem(err);
    if (status == CKD_OK && dim < whole->ndim) {
        status = split_total(totals, l, rule, whole->shape[dim], err);
    }
    layout_whole split = {whole->ndim, whole->shape, totals};
    THEN(status, layout_share_make(&share, l, rule, at, &split, err));
    memcpy(lengths, share.lengths, sizeof(share.lengths));
    layout_share_free(&share);
    free(totals);
    return status;
}
