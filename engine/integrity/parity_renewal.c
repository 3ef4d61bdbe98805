/* Makes new parity, under the publish lock, for files whose groups are about to go. */
#include <stdlib.h>

#include "engine/integrity/internal.h"

/* Creates an empty file, which is durable once the folder is. */
static ckd_status create_mark(const char *path, ckd_error *err) {
    file_writer *f;
    ckd_status status = file_create(&f, path, 0, err);
    return status == CKD_OK ? file_close(f, err) : status;
}

/*
 * No member is removed under the publish lock. If one was removed before, its remover did not know of this group, so
 * the group is dropped. Several files get their names while a mark says that the group is incomplete. Until the mark is
 * durably gone, nobody may rely on the group.
 */
ckd_status parity_publish(bool *done, const ckd_store *store, const parity_group *g, ckd_error *err) {
    pathname folder = path_in(store->path, DIR_PARITY), mark = path_parity_mark(store->path, &g->id);
    ckd_status status = CKD_OK;
    bool marked = g->rows > 1;
    *done = false;
    if (!parity_members_exist(g, store)) {
        return CKD_OK;
    }
    if (marked) {
        status = create_mark(mark.text, err);
        THEN(status, dir_sync(folder.text, err));
    }
    for (uint32_t row = 0; row < g->rows && status == CKD_OK; row++) {
        status = file_rename_noreplace(path_parity(store->path, &g->id, row, ".tmp").text,
                                       path_parity(store->path, &g->id, row, "").text, err);
    }
    THEN(status, dir_sync(folder.text, err));
    if (status == CKD_OK && marked) {
        status = file_remove(mark.text, false, err);
        THEN(status, dir_sync(folder.text, err));
    }
    *done = status == CKD_OK;
    return status;
}

static void keep_only(live_files *all, const parity_files *selected) {
    size_t kept = 0;
    for (size_t i = 0; i < all->count; i++) {
        const ckd_id *id = &all->items[i].file.id;
        if (id_among(id, selected->items, selected->count)) {
            all->items[kept++] = all->items[i];
        }
    }
    all->count = kept;
}

static ckd_status make_group(size_t *covered, const ckd_store *store, parity_group *g, ckd_error *err) {
    uint32_t rows = (UINT32_C(1) << g->rows) - 1;
    bool done = false;
    rate_limiter p = {0};
    g->created_ns = clock_wall_ns();
    ckd_status status = ckd_id_new(&g->id, err);
    THEN(status, parity_write(store, g, rows, &p, err));
    if (status == CKD_OK) {
        status = parity_publish(&done, store, g, err);
        if (!done) {
            parity_write_undo(store, g, rows);
        }
    }
    *covered += done ? g->member_count : 0;
    return status;
}

/* Reads the files and settings of the inputs. */
static ckd_status make_plan(parity_plan *plan, live_files *files, setting_list *settings,
                            const parity_inputs *inputs, const parity_files *selected, ckd_error *err) {
    const ckd_store *store = inputs->store;
    damage_list ignored = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = store->path};
    ckd_status status = ignored.result ? CKD_OK : err_nomem(err, sizeof(ckd_verify_result), "renewed parity");
    THEN(status, settings_read_kind(settings, store, METADATA_PARITY, err));
    THEN(status, live_files_read(files, store, &ignored, err));
    if (status == CKD_OK) {
        keep_only(files, selected);
        status = parity_plan_make(plan, inputs, NULL, err);
    }
    ckd_verify_result_free(ignored.result);
    return status;
}

ckd_status parity_protect_again(size_t *covered, const ckd_store *store, const parity_files *selected,
                                const parity_group *old, ckd_error *err) {
    parity_plan plan = {0};
    live_files files = {0};
    parity_sets no_sets = {0};
    setting_list settings = {0};
    const parity_inputs inputs = {store, &files, &no_sets, &settings, (uint32_t)old->member_count, old->rows};
    *covered = 0;
    ckd_status status = make_plan(&plan, &files, &settings, &inputs, selected, err);
    for (size_t i = 0; i < plan.count && status == CKD_OK; i++) {
        status = make_group(covered, store, &plan.items[i], err);
    }
    parity_plan_free(&plan);
    live_files_free(&files);
    settings_free(&settings);
    return status;
}
