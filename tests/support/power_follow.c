#include "tests/support/power_follow.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/hash.h"
#include "engine/store/handle.h"
#include "tests/support/power_disk.h"
#include "tests/support/scenes.h"

enum { VERSIONS = 3 };

/* What the files of the model are at each step. */
typedef struct followed {
    hash128 models[VERSIONS];
} followed;

static ckd_follow *follow_into(ckd_store *store, const char *dir) {
    static const char *const all[] = {"*"};
    char into[512];
    ckd_follow *f;
    ckd_error err = {0};
    ckd_follow_options o = CKD_FOLLOW_OPTIONS_INIT;
    snprintf(into, sizeof(into), "%s/model", dir);
    o.into = into;
    o.run = SCENE_RUN;
    o.only = all;
    o.only_count = 1;
    o.shard_bytes = 512; /* several files and an index */
    disk_must(ckd_follow_open(&f, store, &o, &err), &err);
    return f;
}

/* The hash of the names and the bytes of all files that a model loader reads. */
static hash128 hash_model(const char *dir) {
    dir_list list;
    bytes all = {0}, content = {0};
    char path[512];
    snprintf(path, sizeof(path), "%s/model", dir);
    assert_int_equal(dir_list_read(&list, path, NULL), CKD_OK); /* sorted */
    for (size_t i = 0; i < list.count; i++) {
        if (list.names[i][0] != '.') {
            snprintf(path, sizeof(path), "%s/model/%s", dir, list.names[i]);
            bytes_put(&all, list.names[i], strlen(list.names[i]));
            assert_int_equal(file_read_all(&content, path, (size_t)1 << 20, NULL), CKD_OK);
            bytes_put(&all, content.data, content.size);
        }
    }
    hash128 hash = hash128_of(all.data, all.size);
    assert_false(all.failed);
    bytes_free(&content);
    bytes_free(&all);
    dir_list_free(&list);
    return hash;
}

/*
 * Opening the folder finishes or undoes what was going on, and then it has one version: no older one than the follower
 * has reported. Nothing is compared with the store, so the files must be right by themselves.
 */
static void check(const char *dir, const expectation *e, bool thorough, void *context) {
    const followed *all = context;
    ckd_store *store;
    ckd_error err = {0};
    ckd_follow_result r;
    (void)thorough;
    disk_must(scene_open(&store, dir, CKD_OPEN_READ, &err), &err);
    ckd_follow *f = follow_into(store, dir);
    ckd_follow_applied(&r, f);
    if (id_is_zero(&r.checkpoint.id)) {
        assert_int_equal(e->committed, 0);
    } else {
        assert_in_range(r.checkpoint.step, e->committed ? e->committed - 1 : 0, VERSIONS - 1);
        hash128 model = hash_model(dir);
        assert_memory_equal(&model, &all->models[r.checkpoint.step], sizeof(model));
    }
    ckd_follow_close(f);
    ckd_store_close(store);
}

/* Brings the folder to the newest version, and notes what it is then. */
static hash128 apply(ckd_follow *f, const char *dir) {
    ckd_follow_result r;
    ckd_error err = {0};
    disk_must(ckd_follow_apply(&r, f, &err), &err);
    assert_true(r.applied);
    return hash_model(dir);
}

void power_follow(void **state) {
    disk *d = *state;
    followed all;
    ckd_error err = {0};
    power p = {.dir = d->p.dir, .check = check, .context = &all};
    scene_make(p.dir, 0, 1);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    power_begin(&p, NULL);
    ckd_follow *f = follow_into(store, p.dir);
    for (uint64_t step = 0; step < VERSIONS; step++) {
        scene s = scene_of(step);
        if (step) {
            disk_must(scene_save(NULL, store, &s, &err), &err);
        }
        all.models[step] = apply(f, p.dir);
        p.now.committed = step + 1; /* versions that must be there */
        power_expect(&p);
    }
    ckd_follow_close(f);
    ckd_store_close(store);
    power_end(&p, "follow");
}
