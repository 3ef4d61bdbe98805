/*
 * How large chunk files of saves are written. By default the fastest way is found by trying all, once for each file system; what came out is
 * remembered in the catalog.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/bytes.h"
#include "engine/save/write_path.h"

/* Trying takes about a tenth of a second: on a disk that is slow with little, nothing more is tried. */
#define TRIAL_FIRST   (UINT64_C(1) << 20)
#define TRIAL_LEAST   (UINT64_C(4) << 20)
#define TRIAL_MOST    (UINT64_C(16) << 20)
#define TRIAL_LONG_NS UINT64_C(10000000)
#define TRIALS_NS     UINT64_C(80000000)
#define REMEMBERED_NS (UINT64_C(30) * 24 * 3600 * 1000000000)
#define KEY           "write path "
/* What another way must save of the buffered one's time: that one also leaves the file in memory, where the next save finds its parent. */
#define WORTH 0.25

static uint64_t least_bytes = UINT64_C(16) << 20;

void store_probe_from(uint64_t size) {
    least_bytes = size;
}

static file_way way_of(ckd_write_path path) {
    return path == CKD_WRITE_URING ? FILE_URING : path == CKD_WRITE_DIRECT ? FILE_DIRECT : FILE_BUFFERED;
}

static ckd_write_path choice_of(file_way way) {
    return way == FILE_URING ? CKD_WRITE_URING : way == FILE_DIRECT ? CKD_WRITE_DIRECT : CKD_WRITE_BUFFERED;
}

/* ---- what was found ---- */

static double sum_of(const ckd_write_choice *c, ckd_write_path path) {
    return c->wall_ms_per_mb[path] + c->work_ms_per_mb[path];
}

static void choose(ckd_write_choice *c) {
    c->path = CKD_WRITE_BUFFERED;
    double least = sum_of(c, CKD_WRITE_BUFFERED) * (1 - WORTH);
    for (ckd_write_path path = CKD_WRITE_DIRECT; path <= CKD_WRITE_URING; path++) {
        if (c->wall_ms_per_mb[path] > 0 && sum_of(c, path) < least) {
            least = sum_of(c, path);
            c->path = path;
        }
    }
}

static void format_note(char out[CATALOG_NOTE], const ckd_write_choice *c) {
    int at = snprintf(out, CATALOG_NOTE, "%" PRIu64, c->probed_ns);
    for (ckd_write_path path = CKD_WRITE_BUFFERED; path <= CKD_WRITE_URING; path++) {
        at += snprintf(out + at, (size_t)(CATALOG_NOTE - at), " %.4g %.4g", c->wall_ms_per_mb[path],
                       c->work_ms_per_mb[path]);
    }
}

/* false: there is none, or nothing that this version wrote. */
static bool parse_note(ckd_write_choice *c, const char *text) {
    double *wall = c->wall_ms_per_mb, *work = c->work_ms_per_mb;
    ckd_write_choice empty = *c;
    bool good = sscanf(text, "%" SCNu64 " %lf %lf %lf %lf %lf %lf", &c->probed_ns, &wall[1], &work[1],
                       &wall[2], &work[2], &wall[3], &work[3]) == 7;
    for (int i = CKD_WRITE_BUFFERED; i <= CKD_WRITE_URING && good; i++) {
        good = wall[i] >= 0 && wall[i] < 1e9 && work[i] >= 0 && work[i] < 1e9;
    }
    good = good && wall[CKD_WRITE_BUFFERED] > 0;
    *c = good ? *c : empty;
    return good;
}

static bool is_recent(const ckd_write_choice *c) {
    uint64_t now = clock_wall_ns();
    return c->probed_ns > 0 && c->probed_ns <= now && now - c->probed_ns < REMEMBERED_NS;
}

static void key_of(char out[CATALOG_NOTE], const ckd_store *store) {
    char device[DIR_DEVICE];
    dir_device(device, store->path);
    snprintf(out, CATALOG_NOTE, KEY "%s", device);
}

/* With the mutex. Not to know is no failure. */
static void recall(ckd_store *store) {
    char key[CATALOG_NOTE], text[CATALOG_NOTE];
    if (store->writing.probed_ns == 0 && store->catalog) {
        key_of(key, store);
        if (catalog_note(text, store->catalog, key, NULL) == CKD_OK && parse_note(&store->writing, text)) {
            choose(&store->writing);
        }
    }
}

ckd_status write_path_note(ckd_store *store, ckd_error *err) {
    char key[CATALOG_NOTE], text[CATALOG_NOTE];
    if (!store->writing_is_new) {
        return CKD_OK;
    }
    key_of(key, store);
    format_note(text, &store->writing);
    return catalog_set_note(store->catalog, key, text, err);
}

/* ---- trying ---- */

/* In a file of a name that recovery removes, should this process die meanwhile. */
static bool try_way(ckd_write_choice *c, const ckd_save *save, file_way way, uint64_t size) {
    file_trial t;
    pathname p = path_chunk(save->store->path, &save->file_id, ".tmp");
    if (file_try_way(&t, p.text, way, size, NULL) != CKD_OK || t.way != way) {
        return false;
    }
    ckd_write_path path = choice_of(way);
    double mb = (double)t.bytes / 1e6, wall = (double)t.wall_ns / 1e6 / mb,
           work = (double)t.work_ns / 1e6 / mb;
    if (c->wall_ms_per_mb[path] <= 0 || wall + work < sum_of(c, path)) { /* the better of two */
        c->wall_ms_per_mb[path] = wall;
        c->work_ms_per_mb[path] = work;
    }
    return true;
}

static ckd_write_choice probe(const ckd_save *save) {
    ckd_write_choice c = {.probed_ns = clock_wall_ns()};
    uint64_t begun = clock_monotonic_ns(), size = TRIAL_FIRST;
    bool good = try_way(&c, save, FILE_BUFFERED, size) && try_way(&c, save, FILE_BUFFERED, size);
    while (good && size < TRIAL_MOST &&
           c.wall_ms_per_mb[CKD_WRITE_BUFFERED] * (double)size < (double)TRIAL_LONG_NS) {
        size *= 4;
        c.wall_ms_per_mb[CKD_WRITE_BUFFERED] = 0;
        good = try_way(&c, save, FILE_BUFFERED, size);
    }
    good = good && size >= TRIAL_LEAST; /* else it says nothing of large files */
    bool can[FILE_WAYS] = {false, good, good};
    for (int round = 0; round < 2 && good; round++) {
        for (file_way way = FILE_BUFFERED; way <= FILE_URING; way++) {
            bool in_time = round == 0 || clock_monotonic_ns() - begun < TRIALS_NS;
            if (in_time && (way == FILE_BUFFERED ? round > 0 : can[way])) {
                bool done = try_way(&c, save, way, size);
                can[way] = can[way] && done;
            }
        }
    }
    choose(&c);
    return c;
}

file_way write_path_choose(ckd_save *save) {
    ckd_store *store = save->store;
    uint64_t expected = save->target.has_lineage ? save->target.lineage.stored_bytes : store->expected_bytes;
    if (store->options.write_path != CKD_WRITE_AUTO) {
        return way_of((ckd_write_path)store->options.write_path);
    }
    if (expected < least_bytes) { /* what is small is as fast in any way, and is found in memory */
        return FILE_BUFFERED;
    }
    pthread_mutex_lock(&store->mutex);
    recall(store);
    bool try = !is_recent(&store->writing) && save->options.rank == 0;
    pthread_mutex_unlock(&store->mutex);
    ckd_write_choice found = try ? probe(save) : (ckd_write_choice){0};
    pthread_mutex_lock(&store->mutex);
    if (try) {
        store->writing = found;
        store->writing_is_new = true;
    }
    file_way way = way_of(store->writing.path);
    pthread_mutex_unlock(&store->mutex);
    return way;
}

ckd_status ckd_store_write_path(ckd_write_choice *out, ckd_store *store, ckd_error *err) {
    (void)err;
    pthread_mutex_lock(&store->mutex);
    recall(store);
    *out = store->writing;
    pthread_mutex_unlock(&store->mutex);
    out->asked = (ckd_write_path)store->options.write_path;
    if (out->asked != CKD_WRITE_AUTO) {
        out->path = out->asked;
    } else if (out->path == CKD_WRITE_AUTO) {
        out->path = CKD_WRITE_BUFFERED;
    }
    return CKD_OK;
}
