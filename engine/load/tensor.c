/* Loads one tensor, or a region of it. */
#include "engine/load/load.h"

static ckd_status find_tensor(const view_tensor **out, const ckd_load *load, const ckd_load_request *q,
                              ckd_error *err) {
    char description[256];
    const view_tensor *t = *out = view_find(load->view, q->name);
    if (!t) {
        return err_set(err, CKD_E_NOT_FOUND, "%s@%llu has no such tensor",
                       load->view->manifest.checkpoint.run,
                       (unsigned long long)load->view->manifest.checkpoint.step);
    }
    ckd_difference differs = load_difference(q, t);
    if (!differs) {
        return CKD_OK;
    }
    load_describe_difference(description, sizeof(description), differs, q, t);
    return err_set(err, CKD_E_MISMATCH, "%s", description);
}

/* For a store in a bucket. The load, which follows, reports errors. */
static void announce(ckd_load *load, const ckd_load_request *q) {
    load_plan *plan;
    if (load->store->mirror && load_plan_make(&plan, load, q, 1, NULL) == CKD_OK) {
        load_plan_announce(plan);
        load_plan_free(plan);
    }
}

ckd_status ckd_load_tensor(ckd_load *load, const ckd_load_request *request, ckd_error *err) {
    ckd_status status = load_check_requests(load, request, 1, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_load_request q = load_request(request);
    load_task task = {.tensor = NULL};
    const view_tensor *t;
    status = find_tensor(&t, load, &q, err);
    THEN(status, load_task_make(&task, load, &q, t, err));
    if (status == CKD_OK) {
        announce(load, request);
    }
    THEN(status, load_task_execute(load, &task, task.count, err));
    THEN(status, load_task_finish(load, &task, err));
    load_task_free(&task);
    return status == CKD_OK ? CKD_OK : err_in_tensor(err, status, q.name);
}
