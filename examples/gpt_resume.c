/* Where training goes on: the newest checkpoint, one that the options name, or one that `ckptdelta run` has chosen. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt_options.h"

/*
 * Finds the checkpoint that `ckptdelta run` has chosen for this attempt, which may not be the newest one. Returns 0 if
 * there is none, or if it is of another run.
 */
static int told_checkpoint(gpt_position *at, uint64_t *step, ckd_store *store, const gpt_options *o) {
    const char *run = getenv("CKPTDELTA_RUN"), *told = getenv("CKPTDELTA_CHECKPOINT");
    const char *separator = told ? strrchr(told, '@') : NULL;
    ckd_checkpoint newest;
    if (!run || strcmp(run, o->run) != 0 || !separator || (size_t)(separator - told) > CKD_RUN_MAX)
        return 0;
    snprintf(at->run, sizeof at->run, "%.*s", (int)(separator - told), told);
    *step = strtoull(separator + 1, NULL, 10);
    at->lineage.run = at->run;
    at->lineage.rewound =
        ckd_store_find(&newest, store, at->run, CKD_LATEST, NULL) != CKD_OK || newest.step != *step;
    return 1;
}

int gpt_resume(gpt_position *at, ckd_store *store, const gpt_options *o, gpt_model *model,
               const gpt_text *text) {
    const char *run = o->resume_run ? o->resume_run : o->run;
    uint64_t step = o->resume_step;
    ckd_checkpoint newest;
    int plain = !o->resume_run && step == CKD_LATEST, told = plain && told_checkpoint(at, &step, store, o);
    run = told ? at->run : run;
    if (plain && !told && ckd_store_find(&newest, store, run, CKD_LATEST, NULL) == CKD_E_NOT_FOUND)
        return 0;
    if (gpt_state_load(store, run, step, model, text, &at->progress))
        return -1;
    if (o->reseed)
        at->progress.seed = o->batch_seed;
    at->lineage.resumed_run = run;
    at->lineage.resumed_step = at->progress.step;
    at->lineage.branch = at->lineage.rewound || strcmp(run, at->lineage.run) != 0;
    return 0;
}

void gpt_resume_report(const gpt_position *at, const gpt_options *o) {
    if (at->lineage.resumed_run)
        printf("resumed from %s at step %" PRIu64 "\n", at->lineage.resumed_run, at->progress.step);
    else if (o->resume)
        printf("run %s has no checkpoint yet: starting at step 0\n", o->run);
}
