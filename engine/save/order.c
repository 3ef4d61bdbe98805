/*
 * The stages of the pipeline that run in block order, one thread at a time: decisions, and the registration by which
 * later blocks know earlier ones. An analysis runs beside those of other blocks, yet depends on some of their results:
 *
 * - Values that this save has already. A block that has the values of a decided block (encode.h, `in_flight`) waits
 *   until that one is registered, and is then analysed again. Two blocks analysed concurrently may not see each other:
 *   before a block is decided, its analysis is repeated if its values were registered meanwhile.
 * - Whether deltas of the tensor win. This is guessed from the blocks decided so far; after a wrong guess the analysis
 *   is repeated.
 * - The number of checkpoints that copies name. They are counted as blocks are decided. The analysis of a copy that is
 *   then one too many is repeated.
 * - The optimizer's moments. A tensor with an optimizer begins when the pipeline is empty.
 * - The rest of the load budget. Decisions use it. The parent of a lossy tile is chosen by the budget as it was two
 *   tiles earlier (lossy.c).
 */
#include "engine/save/internal.h"
#include "engine/encode/encode.h"
#include "engine/save/device.h"
#include "engine/save/lossy.h"
#include "engine/decode/decode.h"

#define SKIP_AFTER \
    4u /* deltas that lost in a row; after that, only one block in RETRY_EVERY of the tensor tries a delta */
#define RETRY_EVERY 8u

static save_slot *slot_of(save_pipeline *p, uint64_t block) {
    return &p->slots[block % p->slot_count];
}

/* ---- whether a delta is tried ---- */

static bool delta_is_due(delta_record *history) {
    return history->losses < SKIP_AFTER || history->since++ % RETRY_EVERY == RETRY_EVERY - 1;
}

static void record_delta(const block_job *job, delta_record *history) {
    if (!block_is_duplicate(job) && (job->analysis.predicted.available || job->analysis.delta_rejected)) {
        bool won =
            job->analysis.predicted.available && job->analysis.predicted.size < job->analysis.standalone.size;
        history->losses = won ? 0 : history->losses + 1;
    }
}

bool order_guess(const save_pipeline *p, uint64_t block) {
    const region_job *rj = p->slots[block % p->slot_count].region_job;
    delta_record history = rj->delta_history;
    for (uint64_t n = p->decided; n < block; n++) {
        if (p->slots[n % p->slot_count].region_job == rj) {
            (void)delta_is_due(&history);
        }
    }
    return delta_is_due(&history);
}

/* ---- decisions ---- */

/* Replaces the expected figures of the region's share by its own, which follow. */
void save_remove_expected(load_budget *budget, const view *v, const view_tensor *parent, double share) {
    if (share > 0) {
        budget_tensor_ended(budget, parent, share);
    }
    for (size_t s = 0; share > 0 && s < parent->shard_count; s++) {
        for (size_t i = 0; i < parent->shards[s].block_count; i++) {
            const record *r = parent->shards[s].blocks[i].record;
            load_cost chain = step_share(v, r), base = record_base(r);
            chain = (load_cost){share * chain.stored, share * chain.work};
            base = (load_cost){share * base.stored, share * base.work};
            budget_remove_expected(budget, &chain, &base);
        }
    }
}

coding_context save_coding_of(const ckd_save *save, const region_job *rj) {
    coding_context c = save->coding.context;
    c.parent = rj->parent;
    return c;
}

ckd_status save_analyse(ckd_save *save, block_job *job, const save_slot *slot, const coding_context *c,
                        ckd_error *err) {
    const region_job *rj = slot->region_job;
    if (!rj->lossy) {
        return block_analyse(job, c, &rj->context, &save->coding.budget, err);
    }
    job->input.values = slot->input;
    return block_lossy_analyse(job, &rj->lossy->tile, c, &rj->context, &save->coding.budget, err);
}

/* Largest allowed error of stored values that may replace the block's own. */
static double bound_of(const region_job *rj) {
    return rj->lossy ? lossy_copy_bound(&rj->lossy->tile) : -1;
}

/* Returns true if a new analysis would have the same result. */
static bool still_holds(const block_job *job, const coding_context *c, const region_job *rj, bool due) {
    bool search_ended = rj->lossy ? block_copies_from_save(job, c) : block_is_duplicate(job);
    return job->state != BLOCK_BLOCKED && job->input.try_delta == due && !block_exceeds_references(job, c) &&
           (search_ended || !block_is_in_save(job, c, &rj->context, bound_of(rj)));
}

/* Returns true if earlier blocks that are not registered yet may have its values: then it cannot be decided yet. */
static bool has_to_wait(const block_job *job, const coding_context *c, const region_job *rj) {
    bool search = rj->lossy ? !block_copies_from_save(job, c) : !block_is_duplicate(job);
    return (search || block_exceeds_references(job, c)) &&
           block_is_in_flight(job, c, &rj->context, bound_of(rj));
}

static ckd_status analyse_again(ckd_save *save, block_job *job, const save_slot *slot, bool due,
                                ckd_error *err) {
    uint64_t begun_ns = clock_monotonic_ns();
    coding_context c = save_coding_of(save, slot->region_job);
    c.in_flight = NULL;
    job->input.try_delta = due;
    ckd_status status = save_analyse(save, job, slot, &c, err);
    save_add_analysis(save, clock_monotonic_ns() - begun_ns);
    return status;
}

static void record_decision(ckd_save *save, block_job *job, save_slot *slot, const delta_record *history) {
    save_pipeline *p = &save->pipeline;
    pthread_rwlock_wrlock(&p->registry_lock);
    p->in_flight.jobs[p->in_flight.count++] = job;
    pthread_rwlock_unlock(&p->registry_lock);
    pthread_mutex_lock(&p->mutex);
    if (!slot->region_job->lossy) {
        slot->region_job->delta_history = *history;
        record_delta(job, &slot->region_job->delta_history);
    }
    slot->stage = SLOT_DECIDED;
    p->decided++;
    pthread_mutex_unlock(&p->mutex);
}

ckd_status save_decide_block(ckd_save *save, uint64_t block, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    save_slot *slot = slot_of(p, block);
    region_job *rj = slot->region_job;
    block_job *job = &save->pipeline.jobs[block % p->slot_count];
    coding_context c = save_coding_of(save, rj);
    if (has_to_wait(job, &c, rj)) {
        pthread_mutex_lock(&p->mutex);
        p->wait_registered = p->registered + 1;
        pthread_mutex_unlock(&p->mutex);
        return CKD_OK;
    }
    delta_record history = rj->delta_history;
    bool due = rj->lossy || delta_is_due(&history) || job->input.precoded.delta;
    if (!still_holds(job, &c, rj, due)) {
        ckd_status status = analyse_again(save, job, slot, due, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    save_remove_expected(&save->coding.budget, save->sources.parent, rj->expected, rj->fraction);
    rj->fraction = 0;
    if (block_wants_values(job, &c, &rj->context, &save->coding.budget)) {
        ckd_status status = save_device_fetch(save, job, rj, err);
        THEN(status, analyse_again(save, job, slot, due, err));
        if (status != CKD_OK) {
            return status;
        }
    }
    block_decide(job, &c, &rj->context, &save->coding.budget);
    ckd_status recorded = rj->lossy ? lossy_record_decided(save, rj->lossy, job, err) : CKD_OK;
    if (recorded != CKD_OK) {
        return recorded;
    }
    if (job->analysis.parent_damaged) {
        atomic_store(&save->sources.damaged, true);
    }
    self_check_record(save, job, rj);
    record_decision(save, job, slot, &history);
    return CKD_OK;
}

/* ---- registration ---- */

static void count_space(ckd_save *save, save_slot *slot, const block_job *job) {
    if (!slot->counted) {
        slot->space = (disk_space){slot->append.side_bytes, 0};
        save_free_space_for(save, job, &slot->region_job->context, &slot->space);
        slot->counted = true;
    }
}

/* Checks for disk space for the next block; if there is too little, asks the saving thread to make some. */
static bool has_room(ckd_save *save, const save_slot *slot, uint64_t block) {
    save_pipeline *p = &save->pipeline;
    pthread_mutex_lock(&p->mutex);
    disk_space all = {p->unwritten.payload + slot->space.payload, p->unwritten.copies + slot->space.copies};
    bool made = p->space_made > block;
    pthread_mutex_unlock(&p->mutex);
    bool fits =
        made || save_has_space(save, all.payload, all.copies, slot->space.payload + slot->space.copies);
    pthread_mutex_lock(&p->mutex);
    p->wants_space = !fits;
    if (fits) {
        p->unwritten = all;
    }
    pthread_mutex_unlock(&p->mutex);
    return fits;
}

/* Lossy blocks are counted with their errors (measures.c). */
static ckd_status record_nonfinite(ckd_save *save, const region_job *rj, const block_job *job,
                                   ckd_error *err) {
    const tensor_context *t = &rj->context;
    return rj->lossy || !job->output.nonfinite
               ? CKD_OK
               : measures_add_nonfinite(&save->registry.nonfinite, t->tensor->name, t->region, t->shape.ndim,
                                        job->output.nonfinite, err);
}

ckd_status save_register_block(ckd_save *save, uint64_t block, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    save_slot *slot = slot_of(p, block);
    block_job *job = &save->pipeline.jobs[block % p->slot_count];
    count_space(save, slot, job);
    if (!has_room(save, slot, block)) {
        return CKD_OK;
    }
    ckd_status status =
        save_register(&slot->append, save, job, &slot->region_job->context, slot->region_job->step, err);
    THEN(status, record_nonfinite(save, slot->region_job, job, err));
    pthread_rwlock_wrlock(&p->registry_lock);
    p->in_flight.count--;
    memmove(p->in_flight.jobs, p->in_flight.jobs + 1, p->in_flight.count * sizeof(*p->in_flight.jobs));
    pthread_rwlock_unlock(&p->registry_lock);
    pthread_mutex_lock(&p->mutex);
    slot->stage = SLOT_REGISTERED;
    p->registered++;
    pthread_mutex_unlock(&p->mutex);
    return status;
}

bool order_may_register(const save_pipeline *p) {
    const save_slot *s = &p->slots[p->registered % p->slot_count];
    return p->registered < p->decided && s->stage == SLOT_ENCODED && !p->wants_space;
}

bool order_may_decide(const save_pipeline *p) {
    const save_slot *s = &p->slots[p->decided % p->slot_count];
    return p->decided < p->pushed && s->stage == SLOT_ANALYSED && p->registered >= p->wait_registered;
}
