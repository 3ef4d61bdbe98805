#include "tests/support/power_local.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "agent/internal.h"
#include "tests/support/power_disk.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { SNAPSHOTS = 4 };

/* Opens a snapshot and loads all that it lists. Returns one more than the newest step. */
static uint64_t load_all(const char *path) {
    ckd_store *store;
    ckd_checkpoint_list *list = NULL;
    ckd_error err = {0};
    uint64_t newest = 0;
    disk_must(ckd_store_open(&store, path, CKD_OPEN_READ, NULL, &err), &err);
    disk_must(ckd_store_list(&list, store, NULL, &err), &err);
    assert_true(list->count > 0);
    for (size_t i = 0; i < list->count; i++) {
        scene s = scene_of(list->items[i].step);
        disk_must(scene_load(store, &s, &err), &err);
        newest = list->items[i].step + 1 > newest ? list->items[i].step + 1 : newest;
    }
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    return newest;
}

/* Every snapshot that has its name is whole, and one of them has the newest state that was reported. */
static void check(const char *dir, const expectation *e, bool thorough, void *context) {
    char folder[512], path[1200];
    dir_list names;
    uint64_t newest = 0;
    (void)thorough;
    snprintf(folder, sizeof(folder), "%s/disk/%s", dir, (const char *)context);
    if (dir_list_read(&names, folder, NULL) != CKD_OK) {
        assert_int_equal(e->committed, 0);
        return;
    }
    for (size_t i = 0; i < names.count; i++) {
        if (names.names[i][0] >= '0' && names.names[i][0] <= '9') {
            snprintf(path, sizeof(path), "%s/%s", folder, names.names[i]);
            uint64_t step = load_all(path);
            newest = step > newest ? step : newest;
        }
    }
    dir_list_free(&names);
    assert_true(newest >= e->committed);
}

/* A tier without other nodes, with the store DIR/store as its files in memory. */
static void begin(tier *t, agent *a, const char *memory, const char *local) {
    char own[600];
    ckd_error err = {0};
    *a = (agent){.options = CKD_AGENT_OPTIONS_INIT};
    a->options.local = local;
    disk_must(ckd_id_new(&a->store_id, &err), &err);
    pthread_mutex_init(&a->mutex, NULL);
    *t = (tier){.agent = a};
    snprintf(t->folder, sizeof(t->folder), "%s", memory);
    snprintf(own, sizeof(own), "%s/own", memory);
    assert_int_equal(symlink("store", own), 0);
    disk_must(scene_open(&t->store, memory, CKD_OPEN_WRITE, &err), &err);
    disk_must(peer_hosts_alone(&t->hosts, &err), &err);
    t->peers = calloc(1, sizeof(*t->peers));
    assert_non_null(t->peers);
    t->peers[0].asked = true;
    pthread_mutex_init(&t->store_mutex, NULL);
    pthread_mutex_init(&t->mutex, NULL);
    peer_condition_init(&t->changed);
}

static void take(tier *t, uint64_t version) {
    t->version = version;
    ckd_error err = {0};
    disk_must(disk_copies_take(t, version, &err), &err);
    disk_copies_decide(t, true);
    assert_true(tier_await_copies(t, version));
}

void power_local(void **state) {
    disk *d = *state;
    char local[600], id[CKD_ID_TEXT], *memory = tempdir_create();
    tier t;
    agent a;
    ckd_error err = {0};
    power p = {.dir = d->p.dir, .check = check, .context = id};
    snprintf(local, sizeof(local), "%s/disk", p.dir);
    scene_make(memory, 0, 1);
    begin(&t, &a, memory, local);
    ckd_id_text(id, &a.store_id);
    power_begin(&p, NULL);
    disk_must(disk_copies_open(&t, &err), &err);
    disk_must(disk_copies_begin(&t, &err), &err);
    for (uint64_t step = 0; step < SNAPSHOTS; step++) {
        scene s = scene_of(step);
        if (step) {
            disk_must(scene_save(NULL, t.store, &s, &err), &err);
        }
        take(&t, step + 1);
        p.now.committed = step + 1;
        power_expect(&p);
    }
    pthread_mutex_lock(&t.mutex);
    t.stopping = true;
    pthread_cond_broadcast(&t.changed);
    pthread_mutex_unlock(&t.mutex);
    disk_copies_end(&t, false);
    power_end(&p, "local");
    ckd_store_close(t.store);
    peer_hosts_free(&t.hosts);
    free(t.peers);
    tempdir_remove(memory);
}
