/*
 * The text of a layout. In an accepted layout, a rule that gives a name in the checkpoint knows the name on
 * the way back, and all ranks together hold each element of a dimension once, not counting copies. A refusal
 * has a message.
 */
#include <stdlib.h>
#include <string.h>

#include "cli/layout/layout.h"
#include "tests/support/fuzz.h"

#define RANKS_TRIED 64

static void check(int good) {
    if (!good)
        abort();
}

static void check_mesh(const layout *l) {
    uint64_t world = 1;
    for (uint32_t i = 0; i < l->axis_count; i++)
        world *= l->axes[i].size;
    check(l->axis_count > 0 && world == l->world && world <= CKD_WORLD_MAX && l->rule_count > 0);
    for (uint32_t rank = 0; rank < l->world && rank < RANKS_TRIED; rank++) {
        uint32_t at[LAYOUT_AXES];
        layout_coordinates(at, l, rank);
        check(layout_rank(l, at) == rank);
        char *path = layout_path_of_rank(l, rank);
        check(path && (l->file_count == 0 || layout_rank_of_path(l, path) == rank));
        free(path);
    }
}

static bool knows(const layout_bindings *b, const layout_rule *rule) {
    for (size_t i = 0; i < b->count; i++)
        if (b->items[i].rule == rule)
            return true;
    return false;
}

/* Binds a name in both directions. The rule must be among those that are found. */
static void check_name(const layout *l, const char *name) {
    layout_bindings there, back;
    ckd_error err;
    check(layout_bind(&there, l, name, false, &err) == CKD_OK);
    for (size_t i = 0; i < there.count && i < 8; i++) {
        const layout_binding *b = &there.items[i];
        for (uint32_t rank = 0; rank < l->world && rank < 4; rank++) {
            uint32_t at[LAYOUT_AXES];
            uint64_t numbers[LAYOUT_NUMBERS];
            char *other;
            layout_coordinates(at, l, rank);
            if (!layout_applies(numbers, l, b, at))
                continue;
            check(layout_other_name(&other, l, b, &(layout_name_values){at, numbers, 0}, &err) == CKD_OK);
            check(layout_bind(&back, l, other, true, &err) == CKD_OK);
            check(b->rule->renamed || b->state != LAYOUT_NONE || b->rule->number_count ||
                  knows(&back, b->rule));
            layout_bindings_free(&back);
            free(other);
        }
    }
    layout_bindings_free(&there);
}

/* All places of the main dimension together hold each element once. */
static void check_cover(const layout *l, const layout_rule *rule, uint64_t size) {
    uint64_t shape[CKD_MAX_DIMS], totals[64], held = 0;
    if (rule->cut_count == 0 || layout_tensors_of(rule) > 64 || l->world > 4096 ||
        rule->cuts[rule->main_cut].over.places > RANKS_TRIED)
        return;
    const layout_cut *cut = &rule->cuts[rule->main_cut];
    for (uint32_t d = 0; d < CKD_MAX_DIMS; d++)
        shape[d] = size;
    for (size_t i = 0; i < layout_tensors_of(rule); i++)
        totals[i] = rule->parts && rule->parts[i].size ? rule->parts[i].size : rule->size ? rule->size : size;
    for (size_t i = 1; rule->parts && !rule->apart && i < rule->part_count; i++)
        totals[0] += rule->parts[i].size;
    uint64_t all = 0;
    for (size_t i = 0; i < layout_tensors_of(rule); i++)
        all += totals[i];
    for (uint32_t rank = 0; rank < l->world; rank++) {
        uint32_t at[LAYOUT_AXES], elsewhere = 0;
        layout_coordinates(at, l, rank);
        for (uint32_t axis = 0; axis < l->axis_count; axis++) {
            bool along = memchr(cut->over.axes, (int)axis, cut->over.count) != NULL;
            elsewhere += !along && at[axis];
        }
        layout_share share;
        ckd_error err;
        if (elsewhere)
            continue;
        if (layout_share_make(&share, l, rule, at, &(layout_whole){CKD_MAX_DIMS, shape, totals}, &err) !=
            CKD_OK) {
            check(err.message[0] && err.status != CKD_OK);
            return;
        }
        for (size_t i = 0; i < share.count; i++) {
            const layout_stretch *s = &share.stretches[i];
            check(s->copy < s->copies);
            held += s->part == LAYOUT_NONE || s->copy ? 0 : s->length;
        }
        layout_share_free(&share);
    }
    check(held == all);
}

/* ---- flat buffers ---- */

typedef struct flat_check {
    const layout *l;
    const uint32_t *at;
    size_t buffers;
} flat_check;

/*
 * With parameters of some sizes, all places together have each element once and in order, and no buffer is
 * too small.
 */
static void check_ranges(const layout *l, const layout_buffer *b, const uint32_t *here) {
    enum { MOST = 8 };
    uint64_t sizes[MOST], next[MOST] = {0};
    size_t count = b->count < MOST ? b->count : MOST;
    layout_range ranges[MOST];
    for (size_t i = 0; i < count; i++)
        sizes[i] = (i * 7 + 3) % 23;
    const layout_over *over = &b->rule->flat.over;
    for (uint32_t place = 0; place < over->places && over->places <= RANKS_TRIED; place++) {
        uint32_t at[LAYOUT_AXES], rest = place;
        layout_ranges r = {sizes, count, ranges, 0};
        ckd_error err;
        memcpy(at, here, sizeof(at));
        for (uint32_t i = over->count; i-- > 0; rest /= l->axes[over->axes[i]].size)
            at[over->axes[i]] = rest % l->axes[over->axes[i]].size;
        if (layout_ranges_make(&r, l, b->rule, at, &err) != CKD_OK) {
            check(err.message[0] && place == 0);
            return;
        }
        for (size_t i = 0; i < count; i++) {
            check(ranges[i].count == 0 ||
                  (ranges[i].first == next[i] && ranges[i].at + ranges[i].count <= r.length));
            next[i] += ranges[i].count;
        }
    }
    for (size_t i = 0; i < count && over->places <= RANKS_TRIED; i++)
        check(next[i] == sizes[i]);
}

static ckd_status check_buffer(void *context, const layout_buffer *b, ckd_error *err) {
    flat_check *c = context;
    layout_bindings found;
    uint64_t numbers[LAYOUT_NUMBERS];
    check(b->name && b->rule->kind == LAYOUT_FLAT);
    check(layout_bind(&found, c->l, b->name, false, err) == CKD_OK);
    check(knows(&found, b->rule)); /* import must know the name that load uses */
    for (size_t i = 0; i < found.count; i++)
        if (found.items[i].rule == b->rule && found.items[i].state == b->state)
            check(layout_applies(numbers, c->l, &found.items[i], c->at));
    layout_bindings_free(&found);
    for (size_t i = 0; i < b->count; i++)
        check(b->parameters[i].line > 0 && strlen(b->parameters[i].plain) <= strlen(b->parameters[i].name));
    if (b->count)
        check_ranges(c->l, b, c->at);
    return ++c->buffers < 64 ? CKD_OK : CKD_E_CANCELLED;
}

static void check_flat(const layout *l) {
    for (uint32_t rank = 0; rank < l->world && rank < 3; rank++) {
        uint32_t at[LAYOUT_AXES];
        ckd_error err = {.status = CKD_OK};
        layout_coordinates(at, l, rank);
        flat_check c = {l, at, 0};
        ckd_status status = layout_each_buffer(l, at, check_buffer, &c, &err);
        check(status == CKD_OK || status == CKD_E_CANCELLED || (status == CKD_E_MISMATCH && err.message[0]));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const names[] = {
        "w", "layers.0.w", "layers.1.qkv.weight", "exp_avg.layers.3.w", "embed.weight", "m.w", "step"};
    layout *l;
    ckd_error err;
    if (layout_parse(&l, (const char *)data, size, "fuzz", &err) != CKD_OK) {
        check(!l && err.status != CKD_OK && strncmp(err.message, "fuzz:", 5) == 0);
        return 0;
    }
    check_mesh(l);
    check_flat(l);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        check_name(l, names[i]);
    for (size_t i = 0; i < l->rule_count && i < 16; i++)
        for (uint64_t n = 0; n < 50; n += 7)
            check_cover(l, &l->rules[i], n);
    layout_release(l);
    return 0;
}
