#include "engine/decode/totals.h"

#include <stdlib.h>

#include "engine/decode/cost.h"
#include "engine/decode/step_inputs.h"

static uint64_t bytes_of(const record *r) {
    return r->header_size + r->stored_size;
}

static uint64_t share_of(const chunk *c, const ckd_id *checkpoint) {
    uint64_t own = 0, all = 0;
    for (size_t i = 0; i < c->outer_count; i++) {
        bool ours = memcmp(&c->outer[i].tensor->checkpoint, checkpoint, sizeof(ckd_id)) == 0;
        all += bytes_of(&c->outer[i]);
        own += ours ? bytes_of(&c->outer[i]) : 0;
    }
    return own == all ? c->size : (uint64_t)((double)c->size * ((double)own / (double)all));
}

static void add_totals(manifest *m, const view *v, role_total totals[CKD_ROLE_OTHER + 1]) {
    ckd_checkpoint *c = &m->checkpoint;
    load_budget cost = {0};
    c->tensors = v->tensor_count;
    c->depth = 0;
    c->raw_bytes = c->stored_bytes = 0;
    for (size_t i = 0; i < v->tensor_count; i++) {
        totals[v->tensors[i].tensor->role].tensors++;
    }
    for (size_t i = 0; i < v->block_count; i++) {
        const record *r = v->blocks[i].record;
        load_cost chain = step_share(v, &v->blocks[i]), base = record_base(r);
        budget_add(&cost, &chain, &chain, &base);
        c->raw_bytes += r->raw_size;
        c->depth = r->depth > c->depth ? r->depth : c->depth;
        totals[r->tensor->role].raw_bytes += r->raw_size;
        totals[r->tensor->role].stored_bytes += view_stored_bytes(&v->blocks[i]);
    }
    for (size_t i = 0; i < v->blob_count; i++) {
        c->raw_bytes += v->blobs[i].record->raw_size;
    }
    for (size_t i = 0; i < v->chunk_count; i++) {
        c->stored_bytes += share_of(v->chunks[i], &c->id);
    }
    c->load_cost = budget_load_cost(&cost);
}

ckd_status totals_set(manifest *m, const view *v, ckd_error *err) {
    role_total totals[CKD_ROLE_OTHER + 1] = {0};
    free(m->roles);
    m->role_count = 0;
    m->roles = calloc(CKD_ROLE_OTHER + 1, sizeof(*m->roles));
    if (!m->roles) {
        return err_nomem(err, sizeof(totals), "role totals");
    }
    add_totals(m, v, totals);
    for (uint32_t role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
        totals[role].role = role;
        if (totals[role].tensors) {
            m->roles[m->role_count++] = totals[role];
        }
    }
    return CKD_OK;
}
