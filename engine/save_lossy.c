#include "engine/save_lossy.h"

#include <math.h>
#include <stdlib.h>

#include "engine/block_lossy.h"
#include "engine/lossy_device.h"

void save_lossy_free(ckd_save *save) {
    kept_seconds_free(save->seconds);
    save->seconds = NULL;
    lossy_buffers *b = &save->lossy;
    bytes *const all[] = {&b->original,       &b->now,       &b->stored,      &b->before,
                          &b->panel_original, &b->panel_now, &b->panel_before};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_free(all[i]);
    }
    if (save->lossy.device) {
        lossy_device_end(save->lossy.device);
        free(save->lossy.device);
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

/* A region that is being saved: all of what was given, or a panel of it. */
typedef struct lossy_piece {
    const tensor_context *context;
    const save_panel *panel; /* NULL: all */
    region_figures figures;
} lossy_piece;

typedef struct lossy_region {
    ckd_save *save;
    const ckd_tensor *tensor;
    const tensor_context *context; /* of all of it */
    save_panels panels;            /* none: it is not cut */
    lossy_piece *pieces;
    size_t count;
    double eps;
} lossy_region;

/* Second moments are remembered, and first ones compared with them. */
static void note_direction(region_figures *f, kept_second *second, const lossy_tile *t, const block_job *job,
                           double eps) {
    const float *decoded = job->lossy_work.decoded;
    uint64_t at = job->first - t->first, of = t->sampled + at;
    if (second && t->part == LOSSY_SECOND) {
        direction_note(&second->sample, of, job->count, t->now + at, decoded);
    } else if (second && t->part == LOSSY_MOMENT) {
        direction_add(&f->direction, &second->sample, of, job->count, t->now + at, decoded, eps);
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

/* The block's elements as they were given; NULL: they are on a device. */
static const void *given_of(const lossy_tile *t, const block_job *job) {
    return t->device ? NULL : (const uint8_t *)t->values + (job->first - t->first) * ckd_dtype_size(t->dtype);
}

/* Decides on, encodes and writes the first `count` jobs, which are analysed. */
static ckd_status write_batch(lossy_batch *b, uint32_t count, ckd_error *err) {
    ckd_save *save = b->save;
    const tensor_context *t = &b->tensor;
    save_room room = {0, 0};
    for (uint32_t i = 0; i < count; i++) {
        if (block_names_too_many(&save->jobs[i], &b->coding)) {
            save->jobs[i].values = given_of(b->tile, &save->jobs[i]);
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

/* Elements of the block that begins at element `at` of the tile, which is a panel's or (NULL) whole. */
static uint64_t block_count(const save_panel *panel, const lossy_tile *t, uint64_t at) {
    uint64_t left = t->count - at,
             here = panel ? save_panel_block(&panel->rows, t->first + at) : lossy_block_count(t, at);
    return here < left ? here : left;
}

/* Of a tile on a device: its blocks' hashes and errors. */
static ckd_status measure_on_device(const save_panel *panel, const lossy_tile *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint64_t at = 0; at < t->count && status == CKD_OK;) {
        uint64_t n = block_count(panel, t, at);
        status = lossy_device_add_block(t, at, n, err);
        at += n;
    }
    return status == CKD_OK ? lossy_device_measure(t, err) : status;
}

/* Sets the next jobs, as many as there are at most, from element *at of the tile on. */
static ckd_status next_jobs(uint32_t *count, uint64_t *at, lossy_region *r, const lossy_piece *p,
                            const lossy_tile *t, known_rows *rows, ckd_error *err) {
    ckd_save *save = r->save;
    ckd_status status = stop_look(&save->stop, err);
    for (*count = 0; *count < save->job_count && *at < t->count && status == CKD_OK;) {
        block_job *job = &save->jobs[(*count)++];
        job->first = t->first + *at;
        job->count = block_count(p->panel, t, *at);
        job->values = given_of(t, job);
        job->try_delta = true;
        if (t->plan.shared_rows) {
            status =
                cells_rows(&job->rows, rows, save, t, *at, job->count, r->context, p->panel->columns, err);
        }
        *at += job->count;
    }
    return status;
}

/* The tile's part in the piece, all of it or a panel's. */
static ckd_status save_tile(lossy_region *r, lossy_piece *p, kept_second *second, const lossy_tile *t,
                            const tile_parent *from, known_rows *rows, ckd_error *err) {
    ckd_save *save = r->save;
    lossy_batch batch = {save, t, save->coding, *p->context};
    batch.coding.parent = from->view;
    batch.tensor.parent = from->tensor;
    ckd_status status = CKD_OK;
    p->figures.measures.movement += t->movement * t->movement * (double)t->count;
    for (uint64_t at = 0; at < t->count && status == CKD_OK;) {
        uint32_t count;
        status = next_jobs(&count, &at, r, p, t, rows, err);
        if (status == CKD_OK) {
            status = pool_run(save->store->pool, count, analyse_one, &batch, err);
        }
        for (uint32_t i = 0; i < count && status == CKD_OK; i++) {
            save->analyse_ns += save->pipeline.slots[i].analyse_ns;
            add_error(&p->figures, &save->jobs[i].error);
            if (save->jobs[i].lossy && !t->device) {
                note_direction(&p->figures, second, t, &save->jobs[i], r->eps);
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
    span all = {context->region, t->first, t->count};
    t->plan.shared =
        t->plan.shared_rows || (lossy_block_count(t, 0) < t->count && (t->plan.own.step || t->plan.own.rank));
    return t->plan.shared ? save_side(&t->shared_content, save, &t->plan.own, context, &all, err) : CKD_OK;
}

static ckd_status save_exactly(lossy_region *r, const lossy_tile *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->count && status == CKD_OK; i++) {
        const save_panel *p = r->pieces[i].panel;
        uint64_t first = p ? t->first / t->columns * p->rows.width : t->first;
        uint64_t count = p ? t->count / t->columns * p->rows.width : t->count;
        status = p ? save_exact_panel(r->save, r->tensor, p, first, first + count, err)
                   : save_exact_span(r->save, r->tensor, r->context, first, first + count, NULL, err);
    }
    return status == CKD_OK ? save_flush(r->save, err) : status;
}

/* A tile whose plan is made. */
static ckd_status save_planned(lossy_region *r, kept_second *second, lossy_tile *t, const tile_parent *from,
                               ckd_error *err) {
    known_rows rows = {0};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->count && status == CKD_OK; i++) {
        lossy_piece *p = &r->pieces[i];
        lossy_tile mine = *t;
        if (p->panel) {
            status = cells_of_panel(&mine, r->save, t, p->panel, err);
            mine.plan.shared_rows = cells_share_rows(t);
        }
        if (status == CKD_OK && t->device) {
            status = measure_on_device(p->panel, &mine, err);
        }
        if (status == CKD_OK) {
            status = share_columns(r->save, &mine, p->context, err);
        }
        if (status == CKD_OK) {
            status = save_tile(r, p, second, &mine, from, &rows, err);
        }
        if (status == CKD_OK && t->device && second && t->part != LOSSY_WEIGHT) {
            direction_sums *sums = t->part == LOSSY_MOMENT ? &p->figures.direction : NULL;
            status = lossy_device_direction(sums, &second->sample, &mine, r->eps, err);
        }
    }
    free(rows.items);
    return status;
}

/* false in *worth: better exactly. false in *here: it is on a device, and the host has to code it. */
static ckd_status prepare_tile(bool *worth, bool *here, kept_second **kept, ckd_save *save, lossy_tile *t,
                               const tensor_context *context, ckd_error *err) {
    const kernels *k = save->jobs[0].decoder.kernels;
    kept_second *second = NULL;
    ckd_status status = CKD_OK;
    if (t->part == LOSSY_SECOND) {
        status = *kept ? CKD_OK : keep_second(kept, save, t, context, err);
        second = *kept;
        t->found = second ? &second->scales : NULL;
        if (second) {
            lossy_scales_free(&second->scales); /* of an attempt before */
        }
    } else {
        *kept = second = find_second(save, t, context);
        t->scales = second && second->scales.row ? &second->scales : NULL;
    }
    if (status == CKD_OK) {
        status = lossy_tile_prepare(t, worth, k, err);
    }
    *here = true;
    if (status == CKD_OK && *worth && t->device) {
        status = lossy_device_code(here, t, err);
    } else if (t->device) {
        *here = false;
    }
    return status;
}

/* Columns of a panel, or of all, at most. */
static uint64_t widest_of(const lossy_region *r) {
    uint64_t widest = r->panels.count ? 1 : UINT64_MAX;
    for (size_t i = 0; i < r->panels.count; i++) {
        uint64_t width = r->panels.items[i].rows.width;
        widest = width > widest ? width : widest;
    }
    return widest;
}

/* From the device's memory, if the tile is there and such that it can be coded there; else, or if that turns out later, from the host's. */
static ckd_status load_and_prepare(bool *worth, tile_parent *from, kept_second **second, lossy_region *r,
                                   lossy_tile *t, ckd_error *err) {
    ckd_save *save = r->save;
    lossy_tile cut = *t;
    bool here = false, device = true;
    ckd_status status = CKD_OK;
    *second = NULL;
    while (!here && status == CKD_OK) {
        lossy_tile_free(t);
        *t = cut;
        status = save_load_tile(from, save, t, r->tensor, r->context, device ? widest_of(r) : 0, err);
        status = status == CKD_OK ? prepare_tile(worth, &here, second, save, t, r->context, err) : status;
        /* Of a device that is broken the host will hear when it reads. */
        if ((status == CKD_E_NOMEM || status == CKD_E_DEVICE) && t->device) {
            store_message(save->store, "%s is coded on the host: %s", r->context->tensor->name,
                          err ? err->message : "too little memory on the device");
            status = CKD_OK;
            here = false;
        }
        device = false;
        if (!here) {
            save_tile_leave_device(save, t);
        }
    }
    return status;
}

static ckd_status save_next_tile(lossy_region *r, lossy_tile *t, ckd_error *err) {
    ckd_save *save = r->save;
    tile_parent from;
    kept_second *second;
    bool worth = false;
    uint64_t begun = clock_monotonic_ns();
    ckd_status status = load_and_prepare(&worth, &from, &second, r, t, err);
    save->analyse_ns += clock_monotonic_ns() - begun;
    if (status != CKD_OK || !worth) {
        return status == CKD_OK ? save_exactly(r, t, err) : status;
    }
    status = save_planned(r, second, t, &from, err);
    if (status == CKD_OK && t->part != LOSSY_SECOND) {
        second_was_used(save, second, r->context);
    }
    return status == CKD_OK ? save_report_progress(save, t->count * ckd_dtype_size(t->dtype), err) : status;
}

/* The same for all tensors of a save, so that tiles of a weight and of its moments match. */
static uint64_t tile_elements(const ckd_save *save) {
    uint64_t most = save->staging / LOSSY_TILE_BYTES;
    most = most < LOSSY_TILE_FEWEST ? LOSSY_TILE_FEWEST : most;
    return most < LOSSY_TILE_ELEMENTS ? most : LOSSY_TILE_ELEMENTS;
}

static ckd_status begin_region(lossy_region *r, uint64_t elements, ckd_error *err) {
    ckd_save *save = r->save;
    ckd_status status = CKD_OK;
    if (save_is_cut_lossy(save, r->context, elements)) {
        status = save_cut(&r->panels, save, r->context, &save->cells.down, &save->cells.across, err);
    }
    r->count = r->panels.count ? r->panels.count : 1;
    r->pieces = status == CKD_OK ? calloc(r->count, sizeof(*r->pieces)) : NULL;
    for (size_t i = 0; i < r->count && r->pieces; i++) {
        const save_panel *panel = r->panels.count ? &r->panels.items[i] : NULL;
        r->pieces[i].panel = panel;
        r->pieces[i].context = panel ? &panel->context : r->context;
    }
    return status == CKD_OK && !r->pieces ? err_nomem(err, r->count * sizeof(*r->pieces), "a tensor")
                                          : status;
}

static ckd_status end_region(lossy_region *r, ckd_status status, ckd_error *err) {
    const tensor_context *context = r->context;
    for (size_t i = 0; i < r->count && status == CKD_OK; i++) {
        lossy_piece *p = &r->pieces[i];
        measures *m = &p->figures.measures;
        uint64_t elements;
        region_count(&elements, &context->shape, p->context->region);
        m->movement = sqrt(m->movement / (double)(elements ? elements : 1));
        m->direction_change = direction_change(&p->figures.direction);
        status = measures_add(&r->save->measures, context->tensor->name, p->context->region,
                              context->shape.ndim, m, err);
    }
    save_panels_free(&r->panels);
    free(r->pieces);
    return status;
}

ckd_status save_lossy_region(ckd_save *save, const ckd_tensor *tensor, const tensor_context *context,
                             uint64_t elements, ckd_error *err) {
    lossy_region r = {.save = save,
                      .tensor = tensor,
                      .context = context,
                      .eps = tensor->optimizer ? tensor->optimizer->eps : USUAL_EPS};
    lossy_recipe recipe = recipe_of(save, context->tensor);
    ckd_status status = save_flush(save, err); /* tiles use its jobs */
    save_stop_expecting(save, context, save->leaves_budget);
    save->leaves_budget = 0;
    status = status == CKD_OK ? begin_region(&r, elements, err) : status;
    for (uint64_t first = 0; first < elements && status == CKD_OK;) {
        lossy_tile t = {.part = save_lossy_part(save, context->tensor),
                        .dtype = context->tensor->dtype,
                        .recipe = &recipe,
                        .pool = save->store->pool,
                        .stop = &save->stop,
                        .expected_movement = NAN};
        lossy_tile_cut(&t, &context->shape, context->region, elements, first, tile_elements(save));
        status = save_next_tile(&r, &t, err);
        first += t.count;
        save_tile_leave_device(save, &t);
        lossy_tile_free(&t);
    }
    return end_region(&r, status, err);
}
