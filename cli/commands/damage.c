/*
 * Reports damage for verify, scrub, repair and parity, as text and as JSON. Also finds each damaged run's newest intact
 * checkpoint, the one to load instead.
 */
#include "cli/commands/damage.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"

static int by_text(const void *left, const void *right) {
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static ckd_status collect_lost(cli_survivors *out, const ckd_verify_result *r, ckd_error *err) {
    size_t total = 0, count = 0;
    for (size_t i = 0; i < r->damage_count; i++) {
        total += r->damage[i].checkpoint_count;
    }
    out->lost = calloc(total ? total : 1, sizeof(*out->lost));
    if (!out->lost) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < r->damage_count; i++) {
        for (size_t j = 0; j < r->damage[i].checkpoint_count; j++) {
            out->lost[count++] = r->damage[i].checkpoints[j];
        }
    }
    qsort(out->lost, count, sizeof(*out->lost), by_text);
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || strcmp(out->lost[i], out->lost[i - 1]) != 0) {
            out->lost[out->lost_count++] = out->lost[i];
        }
    }
    return CKD_OK;
}

static bool has_damage(const cli_survivors *left, const char *run) {
    size_t length = strlen(run);
    for (size_t i = 0; i < left->lost_count; i++) {
        if (strncmp(left->lost[i], run, length) == 0 && left->lost[i][length] == '@') {
            return true;
        }
    }
    return false;
}

/* Examines the checkpoints of one run, starting at index `begin` of the list. Returns the index of the next run. */
static size_t find_newest(cli_survivors *left, const ckd_checkpoint_list *all, size_t begin) {
    const char *run = all->items[begin].run;
    const ckd_checkpoint *newest = NULL;
    size_t end = begin;
    for (; end < all->count && strcmp(all->items[end].run, run) == 0; end++) {
        cli_ref_text ref = cli_ref_text_of(&all->items[end]);
        const char *name = ref.text;
        if (!bsearch(&name, left->lost, left->lost_count, sizeof(*left->lost), by_text)) {
            newest = &all->items[end];
        }
    }
    if (newest && has_damage(left, run)) {
        left->newest[left->count++] = newest;
    }
    return end;
}

void cli_damage_found(const ckd_verify_result *r) {
    if (r->damage_count > 0) {
        cli_left_out();
    }
}

ckd_status cli_find_survivors(cli_survivors *out, const ckd_verify_result *r, ckd_store *store,
                              ckd_error *err) {
    *out = (cli_survivors){0};
    ckd_status status = ckd_store_list(&out->all, store, NULL, err);
    if (status != CKD_OK) {
        return status;
    }
    out->newest = calloc(out->all->count + 1, sizeof(*out->newest));
    if (!out->newest) {
        return cli_error_nomem(err);
    }
    status = collect_lost(out, r, err);
    for (size_t i = 0; i < out->all->count && status == CKD_OK;) {
        i = find_newest(out, out->all, i);
    }
    return status;
}

void cli_survivors_free(cli_survivors *s) {
    free(s->newest);
    free(s->lost);
    ckd_checkpoint_list_free(s->all);
}

ckd_status cli_damage_status(const ckd_verify_result *r, const cli_survivors *left, ckd_error *err) {
    return r->damage_count == 0
               ? CKD_OK
               : cli_error(err, CKD_E_CORRUPT, "%zu place%s damaged; %zu checkpoint%s cannot be loaded",
                           r->damage_count, r->damage_count == 1 ? " is" : "s are", left->lost_count,
                           cli_plural(left->lost_count));
}

ckd_status cli_skip_is_damage(const ckd_error *left, ckd_error *err) {
    if (left->status == CKD_OK || !ckd_error_is_damage(left)) {
        return CKD_OK;
    }
    *err = *left;
    err->status = CKD_E_CORRUPT;
    return CKD_E_CORRUPT;
}

static json_t *json_number(uint64_t number) {
    return number == CKD_NO_OFFSET ? json_null() : json_integer((json_int_t)number);
}

static json_t *json_damage(const ckd_damage *d) {
    json_t *checkpoints = json_array();
    for (size_t i = 0; i < d->checkpoint_count; i++) {
        cli_json_append(&checkpoints, cli_json_text(d->checkpoints[i]));
    }
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "file", cli_json_text(d->file), "tensor",
                     d->tensor[0] ? cli_json_text(d->tensor) : json_null(), "block", json_number(d->block),
                     "offset", json_number(d->offset), "what", cli_json_text(d->what), "checkpoints",
                     checkpoints);
}

json_t *cli_json_damage(const ckd_verify_result *r) {
    json_t *out = json_array();
    for (size_t i = 0; i < r->damage_count; i++) {
        cli_json_append(&out, json_damage(&r->damage[i]));
    }
    return out;
}

json_t *cli_json_newest(const cli_survivors *left) {
    json_t *out = json_array();
    for (size_t i = 0; i < left->count; i++) {
        cli_json_append(&out, json_string(cli_ref_text_of(left->newest[i]).text));
    }
    return out;
}

static void print_damage(const ckd_damage *d) {
    cli_print_clean(stdout, d->what);
    const char *separator = "\n  at ";
    if (d->file[0]) {
        printf("%sfile ", separator);
        cli_print_clean(stdout, d->file);
        separator = ", ";
    }
    if (d->offset != CKD_NO_OFFSET) {
        printf("%soffset %" PRIu64, separator, d->offset);
        separator = ", ";
    }
    if (d->block != CKD_NO_OFFSET) {
        printf("%srecord %" PRIu64, separator, d->block);
        separator = ", ";
    }
    if (d->tensor[0]) {
        printf("%stensor ", separator);
        cli_print_clean(stdout, d->tensor);
    }
    fputs(d->checkpoint_count ? "\n  cannot be loaded: " : "\n  every checkpoint can be loaded", stdout);
    for (size_t i = 0; i < d->checkpoint_count; i++) {
        printf("%s%s", i ? ", " : "", d->checkpoints[i]);
    }
    putchar('\n');
}

void cli_print_damage(const ckd_verify_result *r, const cli_survivors *left, const char *store) {
    for (size_t i = 0; i < r->damage_count; i++) {
        print_damage(&r->damage[i]);
    }
    for (size_t i = 0; i < left->count; i++) {
        printf("the newest intact checkpoint of run %s is step %" PRIu64
               ": ckptdelta load %s --run %s --step %" PRIu64 " --out FILE\n",
               left->newest[i]->run, left->newest[i]->step, store, left->newest[i]->run,
               left->newest[i]->step);
    }
}
