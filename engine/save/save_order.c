/*
 * What is done in the order of the blocks, by one thread at a time: decisions, and what later blocks have to know of those before them. What one block's analysis may look at
 * in others, and why it need not wait for them:
 *
 *   - values that this save has already. Those of blocks that are decided are compared (block_coder.h, `coming`): one that has them waits until these
 *     are settled, and is analysed then. Against blocks analysed at the same time this is made up for before the decision, by analysing once more.
 *   - whether deltas of this tensor pay. It is guessed from what is decided, and a wrong guess analysed once more.
 *   - how many checkpoints copies name. They are counted as blocks are decided; a copy of one too many by then is analysed once more.
 *   - the optimizer's moments. Whoever has an optimizer begins when the pipeline is empty.
 *   - what is left of the load budget. Decisions look at it; who chooses a lossy tile's parent looks at what it was two tiles before (save_lossy.c).
 */
#include "engine/encode/block_lossy.h"
#include "engine/save/save_device.h"
#include "engine/save/save_lossy.h"
#include "engine/decode/step_links.h"

#define SKIP_AFTER \
    4u /* deltas that lost in a row, after which most blocks of the tensor are not tried as one */
#define RETRY_EVERY 8u

static save_slot *slot_of(save_pipeline *p, uint64_t block) {
    return &p->slots[block % p->slot_count];
}

/* ---- whether deltas are tried ---- */

static bool trial_is_due(delta_record *tried) {
    return tried->lost < SKIP_AFTER || tried->since++ % RETRY_EVERY == RETRY_EVERY - 1;
}

static void note_trial(const block_job *job, delta_record *tried) {
    if (!job->known && (job->delta.available || job->delta_lost)) {
        bool won = job->delta.available && job->delta.size < job->standalone.size;
        tried->lost = won ? 0 : tried->lost + 1;
    }
}

bool order_guess(const save_pipeline *p, uint64_t block) {
    const save_piece *piece = p->slots[block % p->slot_count].piece;
    delta_record tried = piece->tried;
    for (uint64_t n = p->decided; n < block; n++) {
        if (p->slots[n % p->slot_count].piece == piece) {
            (void)trial_is_due(&tried);
        }
    }
    return trial_is_due(&tried);
}

/* ---- decisions ---- */

/* The region's own figures replace those expected of its share of the tensor. */
void save_stop_expecting(load_budget *budget, const view *v, const view_tensor *parent, double share) {
    for (size_t s = 0; share > 0 && s < parent->shard_count; s++) {
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

coding_context save_coding_of(const ckd_save *save, const save_piece *piece) {
    coding_context c = save->coding;
    c.parent = piece->parent;
    return c;
}

ckd_status save_analyse(ckd_save *save, block_job *job, const save_slot *slot, const coding_context *c,
                        ckd_error *err) {
    const save_piece *piece = slot->piece;
    if (!piece->lossy) {
        return block_analyse(job, c, &piece->context, &save->budget, err);
    }
    job->values = slot->given;
    return block_lossy_analyse(job, &piece->lossy->tile, c, &piece->context, &save->budget, err);
}

/* How far values that stand for the block's may be. */
static double bound_of(const save_piece *piece) {
    return piece->lossy ? lossy_copy_bound(&piece->lossy->tile) : -1;
}

/* Was the analysis one that would come out the same now? */
static bool still_holds(const block_job *job, const coding_context *c, const save_piece *piece, bool due) {
    bool settled_search = piece->lossy ? block_names_own(job, c) : job->known;
    return !job->awaits && job->try_delta == due && !block_names_too_many(job, c) &&
           (settled_search || !block_is_in_save(job, c, &piece->context, bound_of(piece)));
}

/* Blocks before it that are not settled may have its values: then what it is cannot be said yet. */
static bool has_to_wait(const block_job *job, const coding_context *c, const save_piece *piece) {
    bool search = piece->lossy ? !block_names_own(job, c) : !job->known;
    return (search || block_names_too_many(job, c)) &&
           block_is_coming(job, c, &piece->context, bound_of(piece));
}

static ckd_status analyse_again(ckd_save *save, block_job *job, const save_slot *slot, bool due,
                                ckd_error *err) {
    uint64_t begun = clock_monotonic_ns();
    coding_context c = save_coding_of(save, slot->piece);
    c.coming = NULL;
    job->try_delta = due;
    ckd_status status = save_analyse(save, job, slot, &c, err);
    save_add_analysis(save, clock_monotonic_ns() - begun);
    return status;
}

static void note_decision(ckd_save *save, block_job *job, save_slot *slot, const delta_record *tried) {
    save_pipeline *p = &save->pipeline;
    pthread_rwlock_wrlock(&p->noted);
    p->coming.jobs[p->coming.count++] = job;
    pthread_rwlock_unlock(&p->noted);
    pthread_mutex_lock(&p->mutex);
    if (!slot->piece->lossy) {
        slot->piece->tried = *tried;
        note_trial(job, &slot->piece->tried);
    }
    slot->stage = SLOT_DECIDED;
    p->decided++;
    pthread_mutex_unlock(&p->mutex);
}

/* The next block, which is analysed; it may have to wait. */
static ckd_status decide(ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    uint64_t block = p->decided;
    save_slot *slot = slot_of(p, block);
    save_piece *piece = slot->piece;
    block_job *job = &save->jobs[block % p->slot_count];
    coding_context c = save_coding_of(save, piece);
    if (has_to_wait(job, &c, piece)) {
        pthread_mutex_lock(&p->mutex);
        p->wait_settled = p->settled + 1;
        pthread_mutex_unlock(&p->mutex);
        return CKD_OK;
    }
    delta_record tried = piece->tried;
    bool due = piece->lossy || trial_is_due(&tried) || job->ahead.delta;
    if (!still_holds(job, &c, piece, due)) {
        ckd_status status = analyse_again(save, job, slot, due, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    save_stop_expecting(&save->budget, save->parent, piece->expected, piece->share);
    piece->share = 0;
    if (block_wants_values(job, &c, &piece->context, &save->budget)) {
        ckd_status status = save_device_fetch(save, job, piece, err);
        status = status == CKD_OK ? analyse_again(save, job, slot, due, err) : status;
        if (status != CKD_OK) {
            return status;
        }
    }
    block_decide(job, &c, &piece->context, &save->budget);
    ckd_status noted = piece->lossy ? lossy_note_decided(save, piece->lossy, job, err) : CKD_OK;
    if (noted != CKD_OK) {
        return noted;
    }
    if (job->parent_damaged) {
        atomic_store(&save->damaged, true);
    }
    save_trial_note(save, job, piece);
    note_decision(save, job, slot, &tried);
    return CKD_OK;
}

/* ---- what is encoded is noted ---- */

static void count_room(ckd_save *save, save_slot *slot, const block_job *job) {
    if (!slot->counted) {
        slot->room = (save_room){slot->append.before_bytes, 0};
        save_make_room_for(save, job, &slot->piece->context, &slot->room);
        slot->counted = true;
    }
}

/* For the next block; if not, the saving thread is asked to make some. */
static bool has_room(ckd_save *save, const save_slot *slot, uint64_t block) {
    save_pipeline *p = &save->pipeline;
    pthread_mutex_lock(&p->mutex);
    save_room all = {p->unwritten.payload + slot->room.payload, p->unwritten.copies + slot->room.copies};
    bool made = p->room_made > block;
    pthread_mutex_unlock(&p->mutex);
    bool room = made || save_has_room(save, all.payload, all.copies);
    pthread_mutex_lock(&p->mutex);
    p->wants_room = !room;
    if (room) {
        p->unwritten = all;
    }
    pthread_mutex_unlock(&p->mutex);
    return room;
}

static ckd_status settle(ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    uint64_t block = p->settled;
    save_slot *slot = slot_of(p, block);
    block_job *job = &save->jobs[block % p->slot_count];
    count_room(save, slot, job);
    if (!has_room(save, slot, block)) {
        return CKD_OK;
    }
    ckd_status status = save_settle(&slot->append, save, job, &slot->piece->context, slot->piece->step, err);
    pthread_rwlock_wrlock(&p->noted);
    p->coming.count--;
    memmove(p->coming.jobs, p->coming.jobs + 1, p->coming.count * sizeof(*p->coming.jobs));
    pthread_rwlock_unlock(&p->noted);
    pthread_mutex_lock(&p->mutex);
    slot->stage = SLOT_SETTLED;
    p->settled++;
    pthread_mutex_unlock(&p->mutex);
    return status;
}

static bool may_settle(const save_pipeline *p) {
    const save_slot *s = &p->slots[p->settled % p->slot_count];
    return p->settled < p->decided && s->stage == SLOT_ENCODED && !p->wants_room;
}

static bool may_decide(const save_pipeline *p) {
    const save_slot *s = &p->slots[p->decided % p->slot_count];
    return p->decided < p->pushed && s->stage == SLOT_ANALYSED && p->settled >= p->wait_settled;
}

bool order_is_due(const save_pipeline *p) {
    return may_settle(p) || may_decide(p);
}

ckd_status save_put_in_order(uint64_t *block, ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    ckd_status status = CKD_OK;
    for (bool more = true; more && status == CKD_OK;) {
        pthread_mutex_lock(&p->mutex);
        bool settles = may_settle(p), decides = !settles && may_decide(p);
        *block = settles ? p->settled : p->decided;
        pthread_mutex_unlock(&p->mutex);
        status = settles ? settle(save, err) : decides ? decide(save, err) : CKD_OK;
        more = settles || decides;
    }
    return status;
}
