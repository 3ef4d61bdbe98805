/*
 * The pipeline. What one block's analysis may look at in others, and why it need not wait for them:
 *
 *   - values that this save has already. Those of blocks that are decided are compared (block_coder.h, `coming`): one that has them waits until these
 *     are settled, and is analysed then. Against blocks analysed at the same time this is made up for before the decision, by analysing once more.
 *   - whether deltas of this tensor pay. It is guessed from what is decided, and a wrong guess analysed once more.
 *   - how many checkpoints copies name. They are counted as blocks are decided; a copy of one too many by then is analysed once more.
 *   - the optimizer's moments. Whoever has an optimizer begins when the pipeline is empty.
 */
#include "engine/save_pipeline.h"

#include <stdlib.h>

#include "engine/save.h"

#define SKIP_AFTER \
    4u /* deltas that lost in a row, after which most blocks of the tensor are not tried as one */
#define RETRY_EVERY 8u
#define DEEP_UP_TO  4u /* threads: three places for each; beyond, memory counts more */

uint32_t pipeline_slots(uint32_t threads) {
    return threads == 1 ? 1 : threads <= DEEP_UP_TO ? 3 * threads : 2 * threads + DEEP_UP_TO;
}

ckd_status pipeline_init(save_pipeline *p, uint32_t slots, ckd_error *err) {
    p->slots = calloc(slots, sizeof(*p->slots));
    p->coming = calloc(slots, sizeof(*p->coming));
    p->slot_count = slots;
    p->batch = slots < 3 ? 1 : slots / 3;
    return p->slots && p->coming ? CKD_OK : err_nomem(err, slots * sizeof(*p->slots), "places for blocks");
}

void pipeline_free(save_pipeline *p) {
    free(p->slots);
    free(p->coming);
}

static uint32_t place(const save_pipeline *p, uint32_t index) {
    return (p->oldest + index) % p->slot_count;
}

static uint32_t under_way(const save_pipeline *p) {
    return p->encoded + p->decided + p->analysed + p->fetched;
}

/* ---- a round: what the pool does at the same time ---- */

static ckd_status write_encoded(ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    uint64_t begun = clock_monotonic_ns();
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < p->encoded && status == CKD_OK; i++) {
        uint32_t at = place(p, i);
        status = save_write_block(save, &save->jobs[at], &p->slots[at].append, err);
    }
    p->write_ns = clock_monotonic_ns() - begun;
    return status;
}

/* 0, if there is something to write: that. Then what is to be encoded, then what is to be analysed. */
static ckd_status run_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    ckd_save *save = context;
    save_pipeline *p = &save->pipeline;
    if (p->encoded > 0 && index == 0) {
        return write_encoded(save, err);
    }
    uint32_t nth = (uint32_t)index - (p->encoded > 0);
    bool encode = nth < p->decided;
    uint32_t at = place(p, p->encoded + nth + (encode ? 0 : p->analysed));
    save_slot *slot = &p->slots[at];
    const tensor_context *t = &slot->piece->context;
    uint64_t begun = clock_monotonic_ns();
    ckd_status status = encode ? block_encode(&save->jobs[at], t, err)
                               : block_analyse(&save->jobs[at], &save->coding, t, &save->budget, err);
    *(encode ? &slot->encode_ns : &slot->analyse_ns) = clock_monotonic_ns() - begun;
    return status;
}

/* ---- between rounds ---- */

static bool trial_is_due(delta_record *tried) {
    return tried->lost < SKIP_AFTER || tried->since++ % RETRY_EVERY == RETRY_EVERY - 1;
}

static void note_trial(const block_job *job, delta_record *tried) {
    if (!job->known && (job->delta.available || job->delta_lost)) {
        bool won = job->delta.available && job->delta.size < job->standalone.size;
        tried->lost = won ? 0 : tried->lost + 1;
    }
}

/* As if those before them, which are not decided yet, changed nothing. */
static void guess_trials(ckd_save *save) {
    save_pipeline *p = &save->pipeline;
    const save_piece *piece = NULL;
    delta_record tried = {0};
    for (uint32_t i = 0; i < p->analysed + p->fetched; i++) {
        uint32_t at = place(p, p->encoded + p->decided + i);
        if (p->slots[at].piece != piece) {
            piece = p->slots[at].piece;
            tried = piece->tried;
        }
        bool due = trial_is_due(&tried);
        if (i >= p->analysed) {
            save->jobs[at].try_delta = due;
        }
    }
}

static void prepare_round(ckd_save *save) {
    save_pipeline *p = &save->pipeline;
    for (uint32_t i = 0; i < p->decided; i++) {
        p->coming[i] = &save->jobs[place(p, p->encoded + i)];
    }
    save->coding.coming = p->coming;
    save->coding.coming_count = p->decided;
    guess_trials(save);
}

/* The region's own figures replace those expected of its share of the tensor. */
static void stop_expecting(load_budget *budget, const view *v, const view_tensor *parent, double share) {
    for (size_t s = 0; s < parent->shard_count; s++) {
        for (size_t i = 0; i < parent->shards[s].block_count; i++) {
            const record *r = parent->shards[s].blocks[i].record;
            load_cost chain = step_share(v, &parent->shards[s].blocks[i]), base = record_base(r);
            budget->rest_chain.stored -= share * chain.stored;
            budget->rest_chain.work -= share * chain.work;
            budget->rest_base.stored -= share * base.stored;
            budget->rest_base.work -= share * base.work;
        }
    }
}

void save_stop_expecting(ckd_save *save, const tensor_context *t, double share) {
    if (share > 0) {
        stop_expecting(&save->budget, save->parent, t->parent, share);
    }
}

/* Was the analysis one that would come out the same now? */
static bool still_holds(const ckd_save *save, const block_job *job, const save_piece *piece, bool due) {
    const coding_context *c = &save->coding;
    return !job->awaits && job->try_delta == due && !block_names_too_many(job, c) &&
           (job->known || !block_is_in_save(job, c, &piece->context));
}

/* In order, until one has to wait for those decided here. */
static ckd_status decide(ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    coding_context *c = &save->coding;
    c->coming_count = 0;
    while (p->analysed > 0) {
        uint32_t at = place(p, p->encoded + p->decided);
        block_job *job = &save->jobs[at];
        save_piece *piece = p->slots[at].piece;
        if (!job->known && block_is_coming(job, c, &piece->context)) {
            return CKD_OK;
        }
        delta_record tried = piece->tried;
        bool due = trial_is_due(&tried);
        if (!still_holds(save, job, piece, due)) {
            uint64_t begun = clock_monotonic_ns();
            uint32_t coming = (uint32_t)c->coming_count;
            job->try_delta = due;
            c->coming_count = 0;
            ckd_status status = block_analyse(job, c, &piece->context, &save->budget, err);
            c->coming_count = coming;
            save->analyse_ns += clock_monotonic_ns() - begun;
            if (status != CKD_OK) {
                return status;
            }
        }
        save_stop_expecting(save, &piece->context, piece->share);
        piece->share = 0;
        piece->tried = tried;
        block_decide(job, c, &piece->context, &save->budget);
        note_trial(job, &piece->tried);
        if (job->parent_damaged) {
            save_tell_damage(save);
        }
        p->coming[c->coming_count++] = job;
        p->analysed--;
        p->decided++;
    }
    return CKD_OK;
}

/* What is encoded: noted, and room made for it. */
static ckd_status settle(ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    save_room room = {0, 0};
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < p->encoded && status == CKD_OK; i++) {
        uint32_t at = place(p, i);
        const save_piece *piece = p->slots[at].piece;
        save_make_room_for(save, &save->jobs[at], &piece->context, &room);
        status = save_settle(&p->slots[at].append, save, &save->jobs[at], &piece->context, piece->step, err);
    }
    if (status == CKD_OK && p->encoded > 0) {
        save_make_room(save, room.payload, room.copies);
    }
    return status;
}

static void advance(ckd_save *save) {
    save_pipeline *p = &save->pipeline;
    for (uint32_t i = 0; i < p->decided + p->fetched; i++) {
        const save_slot *slot = &p->slots[place(p, p->encoded + (i < p->decided ? i : i + p->analysed))];
        *(i < p->decided ? &save->encode_ns : &save->analyse_ns) +=
            i < p->decided ? slot->encode_ns : slot->analyse_ns;
    }
    save->append_ns += p->encoded > 0 ? p->write_ns : 0;
    p->oldest = place(p, p->encoded);
    p->encoded = p->decided;
    p->decided = 0;
    p->analysed += p->fetched;
    p->fetched = 0;
}

static ckd_status run_round(ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    ckd_status status = stop_look(&save->stop, err);
    if (status != CKD_OK) {
        return status;
    }
    prepare_round(save);
    status = pool_run(save->store->pool, (p->encoded > 0) + p->decided + p->fetched, run_one, save, err);
    if (status != CKD_OK) {
        return status;
    }
    advance(save);
    status = settle(save, err);
    return status == CKD_OK ? decide(save, err) : status;
}

ckd_status save_flush(ckd_save *save, ckd_error *err) {
    ckd_status status = CKD_OK;
    while (status == CKD_OK && under_way(&save->pipeline) > 0) {
        status = run_round(save, err);
    }
    return status;
}

/* ---- blocks on their way in ---- */

static save_piece *new_piece(ckd_save *save, const tensor_context *t, step_tensor *step, ckd_error *err) {
    save_piece *piece = arena_alloc(&save->arena, sizeof(*piece));
    if (!piece) {
        err_nomem(err, sizeof(*piece), "a tensor's description");
        return NULL;
    }
    *piece = (save_piece){.context = *t, .step = step, .share = save->leaves_budget};
    save->leaves_budget = 0;
    return piece;
}

/* Rounded copies are known by the hashes of masters: these are analysed before. */
static bool waits_for_masters(const ckd_save *save, const tensor_context *t) {
    const save_pipeline *p = &save->pipeline;
    bool may_be_copy = t->tensor->dtype == CKD_BF16 || t->tensor->dtype == CKD_F16;
    for (uint32_t i = 0; i < p->fetched && may_be_copy; i++) {
        if (block_is_master(&p->slots[place(p, p->encoded + p->decided + p->analysed + i)].piece->context)) {
            return true;
        }
    }
    return false;
}

static ckd_status find_place(ckd_save *save, const tensor_context *t, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    ckd_status status = CKD_OK;
    while (status == CKD_OK &&
           (p->fetched == p->batch || under_way(p) == p->slot_count || waits_for_masters(save, t))) {
        status = run_round(save, err);
    }
    return status;
}

static ckd_status fetch_block(ckd_save *save, save_piece *piece, const ckd_tensor *tensor, uint64_t first,
                              uint64_t end, uint64_t *count, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    const tensor_context *t = &piece->context;
    ckd_status status = find_place(save, t, err);
    if (status != CKD_OK) {
        return status;
    }
    uint32_t at = place(p, under_way(p));
    block_job *job = &save->jobs[at];
    uint64_t most = t->rows ? save_panel_block(t->rows, first) : t->block_elements;
    job->first = first;
    job->count = *count = end - first < most ? end - first : most;
    p->slots[at] = (save_slot){.piece = piece, .borrowed = tensor->data && job->count > 0};
    status = save_fetch(&job->values, save, &job->own, tensor, first, job->count, err);
    p->fetched += status == CKD_OK;
    return status;
}

ckd_status save_exact_span(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, uint64_t first,
                           uint64_t end, step_tensor *step, ckd_error *err) {
    size_t size = ckd_dtype_size(tensor->dtype);
    save_piece *piece = new_piece(save, t, step, err);
    ckd_status status = piece ? CKD_OK : CKD_E_NOMEM;
    uint64_t untold = 0, count;
    do {
        status = status == CKD_OK ? fetch_block(save, piece, tensor, first, end, &count, err) : status;
        if (status != CKD_OK) {
            return status;
        }
        first += count;
        untold += count * size;
        if (save->pipeline.fetched == save->pipeline.batch || first >= end) {
            status = save_report_progress(save, untold, err);
            untold = 0;
        }
    } while (status == CKD_OK && first < end);
    return status;
}

ckd_status save_let_go(ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    for (uint32_t i = 0; i < under_way(p) && !save->values_stay; i++) {
        uint32_t at = place(p, i);
        save_slot *slot = &p->slots[at];
        block_job *job = &save->jobs[at];
        if (!slot->borrowed) {
            continue;
        }
        size_t raw = job->count * ckd_dtype_size(slot->piece->context.tensor->dtype);
        void *own = bytes_scratch(&job->own, raw, "a tensor's elements", err);
        if (!own) {
            return CKD_E_NOMEM;
        }
        memcpy(own, job->values, raw);
        block_job_move(job, own);
        slot->borrowed = false;
    }
    return CKD_OK;
}
