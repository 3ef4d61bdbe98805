/*
 * The error figures of a lossy save: those of a region, added up block by block, and the list of all regions' figures,
 * which goes into the chunk file.
 */
#include <math.h>
#include <stdlib.h>

#include "engine/lossy/lossy.h"
#include "engine/save/lossy.h"

/* ---- a region ---- */

/* Records second moments, and compares first moments with them. */
static void record_direction(region_figures *f, moment_stats *second, const lossy_tile *t,
                             const block_job *job, double eps) {
    uint64_t at = job->input.first - t->shape.first;
    direction_values v = {t->input.now + at, job->scratch.lossy.decoded, t->input.sampled + at,
                          job->input.count};
    if (second && t->part == LOSSY_SECOND) {
        direction_record(&second->sample, &v);
    } else if (second && second->sample.count && t->part == LOSSY_MOMENT) {
        direction_add(&f->direction, &second->sample, &v, eps);
    }
}

/* Adds to the sums over a region. */
static void add_error(region_figures *f, const lossy_error *e) {
    measures *to = &f->measures;
    to->error_squares += e->error;
    to->value_squares += e->energy;
    to->max_error = e->largest > to->max_error ? e->largest : to->max_error;
    to->nonfinite += e->exceptions;
}

void figures_add_exact(lossy_region *r, const lossy_tile *t) {
    const kernels *k = r->save->lossy.tiles->loaders[0].kernels;
    for (size_t i = 0; i < r->count; i++) {
        const save_panel *p = r->parts[i].panel;
        uint64_t first = p ? p->first : 0, width = p ? p->rows.width : t->shape.count,
                 next = p ? p->columns : t->shape.count;
        lossy_error e = {0};
        for (uint64_t at = first; at < t->shape.count; at += next) {
            lossy_error_add(&e, t->input.now + at, t->input.now + at, width, k);
        }
        add_error(&r->parts[i].figures, &e);
    }
}

ckd_status lossy_record_decided(ckd_save *save, tile_part *part, const block_job *job, ckd_error *err) {
    inflight_tile *inflight = part->inflight;
    add_error(part->figures, &job->output.error);
    pair_add_update(part->figures, &part->tile.context.pair, job->scratch.lossy.update);
    if (job->output.lossy && !part->tile.input.device) {
        record_direction(part->figures, inflight->second, &part->tile, job, inflight->region->eps[PAIR_EPS]);
    }
    inflight->budget = save->coding.budget;
    return pair_record_block(inflight, &part->tile, job, err);
}

void pair_add_update(region_figures *f, const lossy_pair *pair, double decoded) {
    measures *to = &f->measures;
    if (pair_known(pair)) {
        f->paired = true;
        to->update_given = fmax(to->update_given, pair->bounds[PAIR_EPS].largest);
        to->update = decoded > to->update ? decoded : to->update;
    }
}

/* ---- all regions ---- */

typedef struct reported_measures {
    uint64_t key; /* of the shard */
    size_t order; /* position in the order of arrival */
    measures figures;
    bool exact; /* only figures.nonfinite is reported */
} reported_measures;

/* A shard of the file, and its number there. */
typedef struct numbered {
    uint64_t key, number;
} numbered;

/* Makes room for one report of the region. */
static ckd_status begin_report(uint64_t *key, save_measures *m, const char *tensor, const ckd_region *region,
                               uint32_t ndim, ckd_error *err) {
    if (ARRAY_GROW(m->items, m->capacity, m->count + 1, "measures", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    *key = chunk_shard_key(&m->scratch, tensor, region, ndim);
    return m->scratch.failed ? err_nomem(err, CKD_NAME_MAX, "measures") : CKD_OK;
}

ckd_status measures_add(save_measures *m, const char *tensor, const ckd_region *region, uint32_t ndim,
                        const measures *figures, ckd_error *err) {
    uint64_t key;
    ckd_status status = begin_report(&key, m, tensor, region, ndim, err);
    if (status == CKD_OK) {
        m->items[m->count] = (reported_measures){key, m->count, *figures, false};
        m->count++;
    }
    return status;
}

ckd_status measures_add_nonfinite(save_measures *m, const char *tensor, const ckd_region *region,
                                  uint32_t ndim, uint64_t nonfinite, ckd_error *err) {
    uint64_t key;
    ckd_status status = begin_report(&key, m, tensor, region, ndim, err);
    if (status != CKD_OK) {
        return status;
    }
    if (m->count && m->items[m->count - 1].exact && m->items[m->count - 1].key == key) {
        m->items[m->count - 1].figures.nonfinite += nonfinite;
        return CKD_OK;
    }
    m->items[m->count] = (reported_measures){key, m->count, {.nonfinite = nonfinite}, true};
    m->count++;
    return CKD_OK;
}

ckd_status measures_append(save_measures *m, save_measures *from, ckd_error *err) {
    if (ARRAY_GROW(m->items, m->capacity, m->count + from->count, "measures", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    for (size_t i = 0; i < from->count; i++) {
        m->items[m->count] = from->items[i];
        m->items[m->count].order = m->count;
        m->count++;
    }
    measures_free(from);
    return CKD_OK;
}

static int by_key(const void *a, const void *b) {
    const numbered *x = a, *y = b;
    return x->key < y->key ? -1 : x->key > y->key;
}

static int by_key_and_order(const void *a, const void *b) {
    const reported_measures *x = a, *y = b;
    if (x->key != y->key) {
        return x->key < y->key ? -1 : 1;
    }
    return x->order < y->order ? -1 : x->order > y->order;
}

static int by_shard(const void *a, const void *b) {
    const measures_entry *x = a, *y = b;
    return x->shard < y->shard ? -1 : x->shard > y->shard;
}

static void put_known(double *to, double from) {
    *to = isnan(from) ? *to : from;
}

/* Exact reports come last, and only their number counts beside others. */
static void fold(measures *to, const reported_measures *reported) {
    const measures *from = &reported->figures;
    if (reported->exact) {
        to->nonfinite += from->nonfinite;
        return;
    }
    put_known(&to->error_squares, from->error_squares);
    put_known(&to->value_squares, from->value_squares);
    put_known(&to->max_error, from->max_error);
    put_known(&to->direction_change, from->direction_change);
    put_known(&to->movement, from->movement);
    put_known(&to->update_given, from->update_given);
    put_known(&to->update, from->update);
    to->nonfinite = from->nonfinite ? from->nonfinite : to->nonfinite;
}

/* Turns reports into entries. Both lists are sorted by key. Several reports of one region become one entry. */
static ckd_status join(measures_entry *entries, size_t *count, const save_measures *m, const numbered *shards,
                       size_t shard_count, ckd_error *err) {
    size_t at = 0, n = 0;
    for (size_t i = 0; i < m->count; i++) {
        const reported_measures *reported = &m->items[i];
        if (i > 0 && reported->key == reported[-1].key) {
            fold(&entries[n - 1].measures, reported);
            continue;
        }
        while (at < shard_count && shards[at].key < reported->key) {
            at++;
        }
        if (at == shard_count || shards[at].key != reported->key) {
            return err_set(err, CKD_E_INVALID, "measures were given for a region that was not saved");
        }
        entries[n++] = (measures_entry){shards[at].number, reported->figures};
    }
    *count = n;
    return CKD_OK;
}

ckd_status measures_write_all(save_measures *m, chunk_writer *w, const ckd_id *checkpoint, ckd_error *err) {
    if (m->count == 0) {
        return CKD_OK;
    }
    size_t shard_count, count = 0;
    const uint64_t *keys = chunk_writer_shards(w, &shard_count);
    numbered *shards = calloc(shard_count + 1, sizeof(*shards));
    measures_entry *entries = calloc(m->count, sizeof(*entries));
    ckd_status status = shards && entries ? CKD_OK : err_nomem(err, m->count * sizeof(*entries), "measures");
    for (size_t i = 0; status == CKD_OK && i < shard_count; i++) {
        shards[i] = (numbered){keys[i], i};
    }
    if (status == CKD_OK) {
        qsort(shards, shard_count, sizeof(*shards), by_key);
        qsort(m->items, m->count, sizeof(*m->items), by_key_and_order);
        status = join(entries, &count, m, shards, shard_count, err);
    }
    if (status == CKD_OK) {
        qsort(entries, count, sizeof(*entries), by_shard);
        count = count < MEASURES_ENTRIES ? count : MEASURES_ENTRIES; /* they only inform */
        status = measures_write(w, checkpoint, entries, count, err);
    }
    free(shards);
    free(entries);
    return status;
}

void measures_free(save_measures *m) {
    free(m->items);
    bytes_free(&m->scratch);
    *m = (save_measures){0};
}
