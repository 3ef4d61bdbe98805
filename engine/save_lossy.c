#include "engine/save_lossy.h"

#include <math.h>
#include <stdlib.h>

#include "engine/block_lossy.h"

void save_lossy_free(ckd_save *save) {
    kept_seconds_free(save->seconds);
    save->seconds = NULL;
    bytes *const all[] = {&save->lossy.original, &save->lossy.now, &save->lossy.before};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_free(all[i]);
    }
}

ckd_fidelity save_fidelity(const ckd_save *save, ckd_role role) {
    const ckd_save_options *o = &save->options;
    ckd_fidelity own = o->role_fidelity[role];
    ckd_fidelity chosen = own != CKD_FIDELITY_DEFAULT ? own : o->fidelity;
    return chosen == CKD_FIDELITY_DEFAULT || role == CKD_ROLE_OTHER ? CKD_EXACT : chosen;
}

ckd_fidelity save_coarsest_fidelity(const ckd_save *save) {
    ckd_fidelity coarsest = CKD_EXACT;
    for (ckd_role role = CKD_ROLE_WEIGHT; role < CKD_ROLE_OTHER; role++) {
        ckd_fidelity f = save_fidelity(save, role);
        coarsest = f > coarsest ? f : coarsest;
    }
    return coarsest;
}

/* ---- blocks ---- */

typedef struct lossy_batch {
    ckd_save *save;
    const lossy_tile *tile;
    coding_context coding; /* with the tile's own parent */
    tensor_context tensor;
} lossy_batch;

static ckd_status analyse_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    lossy_batch *b = context;
    uint64_t begun = clock_monotonic_ns();
    ckd_status status =
        block_lossy_analyse(&b->save->jobs[index], b->tile, &b->coding, &b->tensor, &b->save->budget, err);
    b->save->pipeline.slots[index].analyse_ns = clock_monotonic_ns() - begun;
    return status;
}

typedef struct region_figures {
    measures measures;
    direction_sums direction;
} region_figures;

/* Second moments are remembered, and first ones compared with them. */
static void note_direction(region_figures *f, kept_second *second, const lossy_tile *t, const block_job *job,
                           double eps) {
    const float *decoded = job->lossy_work.decoded;
    uint64_t at = job->first - t->first;
    if (second && t->part == LOSSY_SECOND) {
        direction_note(&second->sample, at, job->count, t->now + at, decoded);
    } else if (second && t->part == LOSSY_MOMENT) {
        direction_add(&f->direction, &second->sample, at, job->count, t->now + at, decoded, eps);
    }
}

/* Sums over a region. */
static void add_error(region_figures *f, const lossy_error *e) {
    measures *to = &f->measures;
    to->error_squares += e->error;
    to->value_squares += e->energy;
    to->max_error = e->largest > to->max_error ? e->largest : to->max_error;
    to->nonfinite += e->kept;
}

static ckd_status encode_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    lossy_batch *b = context;
    uint64_t begun = clock_monotonic_ns();
    ckd_status status = block_encode(&b->save->jobs[index], &b->tensor, err);
    b->save->pipeline.slots[index].encode_ns = clock_monotonic_ns() - begun;
    return status;
}

/* Decides on, encodes and writes the first `count` jobs, which are analysed. */
static ckd_status write_batch(lossy_batch *b, uint32_t count, ckd_error *err) {
    ckd_save *save = b->save;
    const tensor_context *t = &b->tensor;
    save_room room = {0, 0};
    for (uint32_t i = 0; i < count; i++) {
        if (block_names_too_many(&save->jobs[i], &b->coding)) {
            ckd_status status = analyse_one(b, i, 0, err);
            if (status != CKD_OK) {
                return status;
            }
        }
        block_decide(&save->jobs[i], &b->coding, t, &save->budget);
        if (save->jobs[i].parent_damaged) {
            save_tell_damage(save);
        }
    }
    ckd_status status = pool_run(save->store->pool, count, encode_one, b, err);
    uint64_t encoded = clock_monotonic_ns();
    for (uint32_t i = 0; i < count; i++) {
        save_make_room_for(save, &save->jobs[i], t, &room);
    }
    save_make_room(save, room.payload, room.copies);
    for (uint32_t i = 0; i < count && status == CKD_OK; i++) {
        save_append append;
        status = save_settle(&append, save, &save->jobs[i], t, NULL, err);
        status = status == CKD_OK ? save_write_block(save, &save->jobs[i], &append, err) : status;
    }
    for (uint32_t i = 0; i < count; i++) {
        save->encode_ns += save->pipeline.slots[i].encode_ns;
    }
    save->append_ns += clock_monotonic_ns() - encoded;
    return status;
}

static ckd_status save_tile(region_figures *figures, kept_second *second, double eps, ckd_save *save,
                            const lossy_tile *t, const tile_parent *from, const tensor_context *context,
                            ckd_error *err) {
    size_t size = ckd_dtype_size(t->dtype);
    lossy_batch batch = {save, t, save->coding, *context};
    batch.coding.parent = from->view;
    batch.tensor.parent = from->tensor;
    ckd_status status = CKD_OK;
    for (uint64_t at = 0; at < t->count && status == CKD_OK;) {
        status = stop_look(&save->stop, err);
        if (status != CKD_OK) {
            return status;
        }
        uint32_t count = 0;
        while (count < save->job_count && at < t->count) {
            block_job *job = &save->jobs[count++];
            job->first = t->first + at;
            job->count = lossy_block_count(t, at);
            job->values = (const uint8_t *)t->values + at * size;
            job->try_delta = true;
            at += job->count;
        }
        status = pool_run(save->store->pool, count, analyse_one, &batch, err);
        for (uint32_t i = 0; i < count && status == CKD_OK; i++) {
            save->analyse_ns += save->pipeline.slots[i].analyse_ns;
            add_error(figures, &save->jobs[i].error);
            if (save->jobs[i].lossy) {
                note_direction(figures, second, t, &save->jobs[i], eps);
            }
        }
        if (status == CKD_OK) {
            status = write_batch(&batch, count, err);
        }
    }
    return status;
}

#define USUAL_EPS 1e-8 /* of Adam, where it is not told */
#define ANCESTOR_BITS \
    0.5 /* about what a delta on an ancestor takes more than one on the parent, an element */
#define KEYFRAME_LOAD 1.5 /* base loads */

#define LEVELS_AFTER_RESUME 24 /* where second moments have no steps else: three octaves */
#define SECOND_FROM         2.0 /* bits a parameter may take, so that there are some for single second moments */

bool save_is_first_after_resume(const ckd_save *save) {
    const save_target *t = &save->target;
    return t->has_lineage && id_equal(&t->resumed_from, &t->lineage.id);
}

/*
 * What a delta leaves out, the next ones of its chain bring; but a resume makes it lost for good. A training that saves once between two
 * resumes would lose a part of its way each time, so the first save after a resume is nearly exact.
 */
static void refine_after_resume(lossy_recipe *r) {
    r->weight *= 0.03125;
    r->moment *= 0.125;
    r->second = r->second == LOSSY_LEVELS_NONE ? LEVELS_AFTER_RESUME : r->second / 3;
}

/* Of the bits that a parameter may take, its weight has three quarters and its first moment a fifth; the second takes next to none. */
static lossy_recipe recipe_of(const ckd_save *save, const record_tensor *tensor) {
    const ckd_save_options *o = &save->options;
    lossy_recipe r = lossy_recipe_of(save_fidelity(save, tensor->role), o->effort);
    if (save_is_first_after_resume(save)) {
        refine_after_resume(&r);
    }
    double raw_bits = 3 * 8 * (double)ckd_dtype_size(tensor->dtype);
    double bits = o->target_ratio > 0 ? raw_bits / o->target_ratio : o->target_bits;
    r.target = bits * (tensor->role == CKD_ROLE_EXP_AVG ? 0.2 : 0.75);
    if (bits > 0 && bits < SECOND_FROM) {
        r.second = LOSSY_LEVELS_NONE;
    }
    r.max_error = o->max_error;
    double scale = o->step_scale > 0 ? o->step_scale : 1;
    r.weight *= scale;
    r.left *= scale;
    r.moment *= scale;
    /* Chains that take longer to decode need larger deltas on ancestors earlier. */
    double room = 0.8 * save->budget.limit - KEYFRAME_LOAD;
    r.bits_for_load = ANCESTOR_BITS / (room > 0.5 ? room : 0.5);
    return r;
}

lossy_part save_lossy_part(const ckd_save *save, const record_tensor *tensor) {
    bool exact = save_fidelity(save, tensor->role) == CKD_EXACT || save->target.compare;
    return exact ? LOSSY_NONE : lossy_part_of(tensor->role, tensor->dtype);
}

/* The part of the columns, once for all blocks of the tile, if there are several. */
static ckd_status share_columns(ckd_save *save, lossy_tile *t, const tensor_context *context,
                                ckd_error *err) {
    if (lossy_block_count(t, 0) == t->count || (!t->plan.own.step && !t->plan.own.rank)) {
        return CKD_OK;
    }
    bytes raw = {0};
    ckd_status status = lattice_columns_encode(&raw, &t->plan.own, &save->jobs[0].lossy_work.work.scratch,
                                               coder_symbols(save->jobs[0].decoder.coder), err);
    if (status == CKD_OK) {
        t->plan.shared = true;
        t->shared_content = content_hash(raw.data, raw.size);
        record r = {.kind = RECORD_SIDE,
                    .tensor = context->tensor,
                    .region = context->region,
                    .first = t->first,
                    .count = t->count,
                    .raw_size = raw.size,
                    .stored_size = raw.size,
                    .content = t->shared_content,
                    .chain_stored = raw.size,
                    .base_stored = raw.size};
        status = chunk_writer_append(save->writer, &r, raw.data, err);
    }
    bytes_free(&raw);
    return status;
}

static ckd_status save_next_tile(region_figures *figures, ckd_save *save, lossy_tile *t,
                                 const ckd_tensor *tensor, const tensor_context *context, ckd_error *err) {
    tile_parent from;
    uint64_t begun = clock_monotonic_ns();
    ckd_status status = save_load_tile(&from, save, t, tensor, context, err);
    kept_second *second = NULL;
    if (status == CKD_OK && t->part == LOSSY_SECOND) {
        status = keep_second(&second, save, t, context, err);
        t->found = second ? &second->scales : NULL;
    } else if (status == CKD_OK) {
        second = find_second(save, t, context);
        t->scales = second && second->scales.row ? &second->scales : NULL;
    }
    bool worth = false;
    if (status == CKD_OK) {
        status = lossy_tile_prepare(t, &worth, save->jobs[0].decoder.kernels, err);
    }
    save->analyse_ns += clock_monotonic_ns() - begun;
    if (status != CKD_OK) {
        return status;
    }
    if (!worth) {
        status = save_exact_span(save, tensor, context, t->first, t->first + t->count, NULL, err);
        return status == CKD_OK ? save_flush(save, err) : status;
    }
    status = share_columns(save, t, context, err);
    if (status != CKD_OK) {
        return status;
    }
    figures->measures.movement += t->movement * t->movement * (double)t->count;
    double eps = tensor->optimizer ? tensor->optimizer->eps : USUAL_EPS;
    status = save_tile(figures, second, eps, save, t, &from, context, err);
    if (t->part != LOSSY_SECOND) {
        second_was_used(save, second, context);
    }
    return status == CKD_OK ? save_report_progress(save, t->count * ckd_dtype_size(t->dtype), err) : status;
}

/* The same for all tensors of a save, so that tiles of a weight and of its moments match. */
static uint64_t tile_elements(const ckd_save *save) {
    uint64_t most = save->staging / LOSSY_TILE_BYTES;
    most = most < LOSSY_TILE_FEWEST ? LOSSY_TILE_FEWEST : most;
    return most < LOSSY_TILE_ELEMENTS ? most : LOSSY_TILE_ELEMENTS;
}

ckd_status save_lossy_region(ckd_save *save, const ckd_tensor *tensor, const tensor_context *context,
                             uint64_t elements, ckd_error *err) {
    ckd_status status = save_flush(save, err); /* tiles use its jobs */
    save_stop_expecting(save, context, save->leaves_budget);
    save->leaves_budget = 0;
    lossy_recipe recipe = recipe_of(save, context->tensor);
    region_figures figures = {0};
    for (uint64_t first = 0; first < elements && status == CKD_OK;) {
        lossy_tile t = {.part = save_lossy_part(save, context->tensor),
                        .dtype = context->tensor->dtype,
                        .recipe = &recipe,
                        .pool = save->store->pool,
                        .stop = &save->stop,
                        .expected_movement = NAN};
        lossy_tile_cut(&t, &context->shape, context->region, elements, first, tile_elements(save));
        status = save_next_tile(&figures, save, &t, tensor, context, err);
        first += t.count;
        lossy_tile_free(&t);
    }
    figures.measures.movement = sqrt(figures.measures.movement / (double)(elements ? elements : 1));
    figures.measures.direction_change = direction_change(&figures.direction);
    return status == CKD_OK ? measures_add(&save->measures, context->tensor->name, context->region,
                                           context->shape.ndim, &figures.measures, err)
                            : status;
}
