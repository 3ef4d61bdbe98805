/*
 * Attaches measures to the shards of a checkpoint: how far its values are from the original ones, and how many are not
 * finite.
 */
#include <math.h>
#include <stdlib.h>

#include "engine/store/view.h"

static const measures unknown = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0};

double measures_rel_l2(const measures *m) {
    if (m->error_squares == 0) {
        return 0;
    }
    double ratio = m->error_squares / m->value_squares;
    return isfinite(ratio) && isfinite(m->value_squares) ? sqrt(ratio) : NAN;
}

uint64_t view_tensor_nonfinite(const view_tensor *t) {
    uint64_t sum = 0;
    for (size_t i = 0; i < t->shard_count; i++) {
        sum += t->shards[i].measures.nonfinite;
    }
    return sum;
}

/* Returns the shards whose first block is in c, in the order of its records, and sets *count. NULL: out of memory. */
static view_shard **shards_of(view *v, const chunk *c, const chunk_records *own, size_t *count) {
    view_shard **by_record = calloc(own->count + 1, sizeof(view_shard *));
    *count = 0;
    for (size_t i = 0; by_record && i < v->shard_count; i++) {
        const view_block *first = &v->shards[i].blocks[0];
        if (first->chunk == c) {
            by_record[first->record - own->records] = &v->shards[i];
        }
    }
    for (size_t i = 0; by_record && i < own->count; i++) {
        if (by_record[i]) {
            by_record[(*count)++] = by_record[i];
        }
    }
    return by_record;
}

/* Whether all entries belong to shards of the file. If one does not, the whole table is unusable. */
static bool fits(const measures_entry *entries, size_t count, size_t shard_count) {
    return count == 0 || entries[count - 1].shard < shard_count;
}

static ckd_status attach(view *v, const chunk *c, const chunk_records *own, const record *r, ckd_error *err) {
    size_t shard_count, count = 0;
    measures_entry *entries = NULL;
    view_shard **shards = shards_of(v, c, own, &shard_count);
    ckd_status status = shards ? measures_read(&entries, &count, c, r, err)
                               : err_nomem(err, own->count * sizeof(*shards), "measures");
    bool usable = status == CKD_OK && fits(entries, count, shard_count);
    for (size_t i = 0; usable && i < count; i++) {
        shards[entries[i].shard]->measures = entries[i].measures;
    }
    for (size_t i = 0; !usable && shards && i < shard_count; i++) {
        shards[i]->measures = unknown;
    }
    free(entries);
    free(shards);
    return status == CKD_E_NOMEM ? status : CKD_OK;
}

ckd_status view_attach_measures(view *v, ckd_status inconsistent, ckd_error *err) {
    for (size_t i = 0; i < v->chunk_count; i++) {
        const chunk *c = v->chunks[i];
        const record *found = NULL;
        const chunk_records *own = v->parts[i];
        for (size_t k = 0; k < own->count; k++) {
            const record *r = &own->records[k];
            if (r->kind != RECORD_MEASURES) {
                continue;
            }
            if (found) {
                err_corrupt(err, file_path(c->file), r->offset,
                            "a checkpoint has measures twice in one file");
                if (err) {
                    err->status = inconsistent;
                }
                return inconsistent;
            }
            found = r;
        }
        ckd_status status = found ? attach(v, c, own, found, err) : CKD_OK;
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}
