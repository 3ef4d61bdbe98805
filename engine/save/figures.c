/* The figures of a lossy region: errors, directions and updates, added up block by block. */
#include <math.h>

#include "engine/lossy/moment_pair.h"
#include "engine/save/lossy.h"

/* Records second moments, and compares first moments with them. */
static void record_direction(region_figures *f, moment_stats *second, const lossy_tile *t,
                             const block_job *job, double eps) {
    const float *decoded = job->lossy_work.decoded;
    uint64_t at = job->first - t->first, of = t->sampled + at;
    if (second && t->part == LOSSY_SECOND) {
        direction_record(&second->sample, of, job->count, t->now + at, decoded);
    } else if (second && second->sample.count && t->part == LOSSY_MOMENT) {
        direction_add(&f->direction, &second->sample, of, job->count, t->now + at, decoded, eps);
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
    const kernels *k = r->save->tiles->loaders[0].kernels;
    for (size_t i = 0; i < r->count; i++) {
        const save_panel *p = r->pieces[i].panel;
        uint64_t first = p ? p->first : 0, width = p ? p->rows.width : t->count,
                 next = p ? p->columns : t->count;
        lossy_error e = {0};
        for (uint64_t at = first; at < t->count; at += next) {
            lossy_error_add(&e, t->now + at, t->now + at, width, k);
        }
        add_error(&r->pieces[i].figures, &e);
    }
}

ckd_status lossy_record_decided(ckd_save *save, tile_part *of, const block_job *job, ckd_error *err) {
    inflight_tile *held = of->held;
    add_error(of->figures, &job->error);
    pair_add_update(of->figures, &of->tile.pair, job->lossy_work.update);
    if (job->lossy && !of->tile.device) {
        record_direction(of->figures, held->second, &of->tile, job, held->region->eps[PAIR_EPS]);
    }
    held->seen = save->budget;
    return pair_record_block(held, &of->tile, job, err);
}

void pair_add_update(region_figures *f, const lossy_pair *pair, double decoded) {
    measures *to = &f->measures;
    if (pair_known(pair)) {
        f->paired = true;
        to->update_given = fmax(to->update_given, pair->bounds[PAIR_EPS].largest);
        to->update = decoded > to->update ? decoded : to->update;
    }
}
