/* Reads manifests, and lists those that count. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/damage.h"
#include "engine/store/handle.h"

ckd_status store_read_manifest(manifest *out, const ckd_store *store, const char *run, uint64_t step,
                               uint32_t generation, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    pathname p = path_manifest(store->path, run, step, generation);
    bytes data = {0};
    ckd_status status = file_read_all(&data, p.text, METADATA_MAX, err);
    THEN(status, manifest_decode(out, &store->id, data.data, data.size, p.text, err));
    if (status == CKD_OK && (strcmp(out->checkpoint.run, run) != 0 || out->checkpoint.step != step ||
                             out->checkpoint.generation != generation)) {
        status = err_corrupt(err, p.text, CKD_NO_OFFSET,
                             "this file holds the manifest of %s@%llu, which does not match its name",
                             out->checkpoint.run, (unsigned long long)out->checkpoint.step);
        manifest_free(out);
    }
    if (status == CKD_OK) {
        out->checkpoint.stored_bytes += data.size;
        out->file_bytes = data.size;
    }
    bytes_free(&data);
    return status;
}

static int by_run_and_step(const manifest_name *x, const manifest_name *y) {
    int order = strcmp(x->run, y->run);
    return order ? order : (x->step > y->step) - (x->step < y->step);
}

static int by_name(const void *a, const void *b) {
    const manifest_name *x = a, *y = b;
    int order = by_run_and_step(x, y);
    if (order) {
        return order;
    }
    return x->generation > y->generation ? -1 : x->generation < y->generation;
}

static ckd_status read_names(manifest_list *out, const ckd_store *store, const char *dir, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, dir).text, err);
    if (status != CKD_OK) {
        return status;
    }
    out->items = calloc(list.count + 1, sizeof(*out->items));
    if (!out->items) {
        status = err_nomem(err, list.count * sizeof(*out->items), "manifest names");
    }
    for (size_t i = 0; i < list.count && out->items; i++) {
        if (manifest_name_parse(&out->items[out->count], list.names[i])) {
            out->count++;
        }
    }
    dir_list_free(&list);
    if (out->count) {
        qsort(out->items, out->count, sizeof(*out->items), by_name);
    }
    return status;
}

const manifest_name *manifests_covering_tombstone(const manifest_list *tombstones,
                                                  const manifest_name *name) {
    size_t low = 0, high = tombstones->count;
    while (low < high) { /* finds the first that is not less than `name` */
        size_t middle = low + (high - low) / 2;
        if (by_run_and_step(&tombstones->items[middle], name) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const manifest_name *found = NULL;
    for (; low < tombstones->count && same_checkpoint_name(&tombstones->items[low], name); low++) {
        found = tombstones->items[low].generation >= name->generation ? &tombstones->items[low] : found;
    }
    return found;
}

ckd_status manifests_mark_covering(bool **out, const manifest_list *tombstones, const manifest_list *names,
                                   ckd_error *err) {
    bool *covers = calloc(tombstones->count + 1, sizeof(*covers));
    *out = covers;
    for (size_t i = 0; i < names->count && covers; i++) {
        const manifest_name *covering = manifests_covering_tombstone(tombstones, &names->items[i]);
        if (covering) {
            covers[covering - tombstones->items] = true;
        }
    }
    return covers ? CKD_OK : err_nomem(err, tombstones->count, "tombstones");
}

ckd_status manifests_tombstones(manifest_list *out, const ckd_store *store, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = read_names(out, store, DIR_TOMBSTONES, &why);
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

ckd_status manifests_read_all(manifest_list *out, const ckd_store *store, ckd_error *err) {
    return read_names(out, store, DIR_MANIFESTS, err);
}

bool manifests_contain(const manifest_list *list, const manifest_name *name) {
    return list->count && bsearch(name, list->items, list->count, sizeof(*list->items), by_name);
}

ckd_status manifests_read(manifest_list *out, const ckd_store *store, ckd_error *err) {
    manifest_list tombstones = {0};
    ckd_status status = manifests_read_all(out, store, err);
    THEN(status, manifests_tombstones(&tombstones, store, err));
    size_t kept = 0;
    for (size_t i = 0; i < out->count && status == CKD_OK; i++) {
        if (!manifests_covering_tombstone(&tombstones, &out->items[i])) {
            out->items[kept++] = out->items[i];
        }
    }
    out->count = kept;
    manifests_free(&tombstones);
    if (status != CKD_OK) {
        manifests_free(out);
    }
    return status;
}

/* The index of the first item of this run and step, or of the one after it. */
static size_t find_name(const manifest_list *list, const char *run, uint64_t step) {
    size_t low = 0, high = list->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(list->items[middle].run, run);
        if (order < 0 || (order == 0 && list->items[middle].step < step)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static bool has_name(const manifest_list *list, size_t at, const char *run, uint64_t step) {
    return at < list->count && list->items[at].step == step && strcmp(list->items[at].run, run) == 0;
}

static ckd_status above_listed(uint32_t *out, const manifest_list *manifests, const manifest_list *tombstones,
                               const char *run, uint64_t step, ckd_error *err) {
    *out = 0;
    if (has_name(manifests, find_name(manifests, run, step), run, step)) {
        return err_set(err, CKD_E_EXISTS, "there is a manifest of %s@%llu already", run,
                       (unsigned long long)step);
    }
    size_t dead = find_name(tombstones, run, step); /* the highest generation comes first */
    if (!has_name(tombstones, dead, run, step)) {
        return CKD_OK;
    }
    if (tombstones->items[dead].generation == UINT32_MAX) {
        return err_set(
            err, CKD_E_INVALID,
            "%s@%llu cannot be saved again: its last generation number was used by a deleted checkpoint; "
            "save another step, or to another run",
            run, (unsigned long long)step);
    }
    *out = tombstones->items[dead].generation + 1;
    return CKD_OK;
}

/*
 * Raises *above to one more than the highest generation of lost checkpoints of this name that data/q keeps. If such a
 * manifest is restored, it must not take the place of a later checkpoint.
 */
static ckd_status raise_above_lost(uint32_t *above, const ckd_store *store, const char *run, uint64_t step,
                                   ckd_error *err) {
    char prefix[CKD_RUN_MAX + 32];
    dir_list list;
    int length = snprintf(prefix, sizeof(prefix), "%s.%llu.", run, (unsigned long long)step);
    ckd_status status = damage_list_folder(&list, store, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < list.count; i++) {
        const char *name = list.names[i], *end = strrchr(name, '.');
        bool lost = end && (strcmp(end, VANISHED_END) == 0 || strcmp(end, DOUBTFUL_END) == 0);
        if (lost && strncmp(name, prefix, (size_t)length) == 0 && name[length] >= '0' &&
            name[length] <= '9') {
            unsigned long generation = strtoul(name + length, NULL, 10);
            *above = generation < UINT32_MAX && generation + 1 > *above ? (uint32_t)generation + 1 : *above;
        }
    }
    dir_list_free(&list);
    return CKD_OK;
}

ckd_status manifests_pick_generation(uint32_t *out, const ckd_store *store, const manifest_list *manifests,
                                     const manifest_list *tombstones, const manifest_name *name,
                                     ckd_error *err) {
    ckd_status status = above_listed(out, manifests, tombstones, name->run, name->step, err);
    return status == CKD_OK ? raise_above_lost(out, store, name->run, name->step, err) : status;
}

ckd_status manifests_new_generation(uint32_t *out, const ckd_store *store, const char *run, uint64_t step,
                                    ckd_error *err) {
    manifest_list manifests, tombstones = {0};
    *out = 0;
    ckd_status status = manifests_read(&manifests, store, err);
    if (status != CKD_OK) {
        return status;
    }
    manifest_name name = {.step = step};
    snprintf(name.run, sizeof(name.run), "%s", run);
    status = manifests_tombstones(&tombstones, store, err);
    THEN(status, manifests_pick_generation(out, store, &manifests, &tombstones, &name, err));
    manifests_free(&manifests);
    manifests_free(&tombstones);
    return status;
}

void manifests_free(manifest_list *list) {
    free(list->items);
    memset(list, 0, sizeof(*list));
}
