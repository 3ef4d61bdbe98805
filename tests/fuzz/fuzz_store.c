/*
 * Whole small stores from any bytes, read by all kinds of calls. All checksums and content hashes match, so
 * that ids, counts, dependencies and payloads matter. The first byte selects the calls. Files follow: number
 * of the folder, length of the name, name, size in 4 bytes, bytes. tests/corpus/make_stores.py writes such
 * inputs from stores.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "include/ckptdelta.h"
#include "tests/support/fuzz.h"

enum {
    FILES_MAX = 64,
    NAME_ROOM = 80,
    OPERATIONS = 8,
    BYTES_MAX = 1 << 24,
    FILE_MAX = 1 << 28,
    CHECKPOINTS_MAX = 16
};

static const char *const folders[] = {"", "c", "m", "n", "t", "i", "k", "p", "q", "r", "x"};
enum { FOLDERS = sizeof(folders) / sizeof(folders[0]) };

static char root[64], place[96], other[96];

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

/* ---- the directory ---- */

static void remove_all(const char *path) {
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        char below[512];
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        snprintf(below, sizeof(below), "%s/%s", path, e->d_name);
        if (unlink(below) != 0) {
            remove_all(below);
        }
    }
    if (d) {
        closedir(d);
    }
    rmdir(path);
}

static void remove_root(void) {
    remove_all(root);
}

static void make_root(void) {
    if (root[0]) {
        return;
    }
    const char *in = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : getenv("TMPDIR");
    snprintf(root, sizeof(root), "%.40s/ckptdelta-fuzz-XXXXXX", in ? in : "/tmp");
    require(mkdtemp(root) != NULL);
    snprintf(place, sizeof(place), "%s/store", root);
    snprintf(other, sizeof(other), "%s/other", root);
    atexit(remove_root);
    /* An input cannot make a file grow without limit. One that does ends the program with SIGXFSZ. */
    require(setrlimit(RLIMIT_FSIZE, &(struct rlimit){FILE_MAX, FILE_MAX}) == 0);
}

static void write_file(const char *folder, const char *name, const uint8_t *data, size_t size) {
    char path[256];
    int n = snprintf(path, sizeof(path), "%s/data%s%s/%s", place, folder[0] ? "/" : "", folder, name);
    require(n > 0 && (size_t)n < sizeof(path));
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600);
    if (fd < 0) {
        return; /* a folder has this name */
    }
    require(size == 0 || write(fd, data, size) == (ssize_t)size);
    close(fd);
}

/* Makes a name that stays within its folder. */
static void take_name(char to[NAME_ROOM], const uint8_t *from, size_t length) {
    memcpy(to, from, length);
    to[length] = '\0';
    for (char *c = to; *c; c++) {
        *c = *c == '/' ? '_' : *c;
    }
    if (!to[0] || strcmp(to, ".") == 0 || strcmp(to, "..") == 0) {
        strcpy(to, "_");
    }
}

static void unpack(const uint8_t *data, size_t size) {
    char path[256];
    mkdir(place, 0700);
    for (size_t i = 0; i < FOLDERS; i++) {
        snprintf(path, sizeof(path), "%s/data/%s", place, folders[i]);
        mkdir(path, 0700);
    }
    for (int files = 0; files < FILES_MAX && size > 6; files++) {
        char name[NAME_ROOM];
        size_t folder = data[0] % FOLDERS, length = data[1] % (NAME_ROOM - 1);
        if (length + 6 > size) {
            return;
        }
        take_name(name, data + 2, length);
        uint32_t declared = data[2 + length] | (uint32_t)data[3 + length] << 8 |
                            (uint32_t)data[4 + length] << 16 | (uint32_t)data[5 + length] << 24;
        data += 6 + length;
        size -= 6 + length;
        size_t used = declared < size ? declared : size;
        write_file(folders[folder], name, data, used);
        data += used;
        size -= used;
    }
}

/* ---- calls that read ---- */

static void load_tensors(ckd_load *load) {
    const ckd_tensor_list *tensors = ckd_load_tensors(load);
    ckd_error err;
    for (size_t i = 0; i < tensors->count; i++) {
        const ckd_tensor_info *t = &tensors->items[i];
        size_t size = t->elements * ckd_dtype_size(t->dtype);
        if (t->elements > BYTES_MAX || size > BYTES_MAX) {
            continue;
        }
        ckd_load_request r = CKD_LOAD_REQUEST_INIT;
        r.name = t->name;
        r.size = size;
        r.data = malloc(size ? size : 1);
        require(r.data != NULL);
        (void)ckd_load_tensor(load, &r, &err);
        free(r.data);
    }
}

static void load_blobs(ckd_load *load) {
    ckd_blob_list *blobs;
    ckd_error err;
    if (ckd_load_blobs(&blobs, load, &err) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < blobs->count; i++) {
        void *data;
        size_t size;
        if (blobs->items[i].size <= BYTES_MAX) {
            (void)ckd_load_blob(&data, &size, load, blobs->items[i].name, &err);
            ckd_blob_free(data);
        }
    }
    ckd_blob_list_free(blobs);
}

/* Loads half of a tensor, as another layout would, and explains that load. */
static void load_regions(ckd_load *load) {
    const ckd_tensor_list *tensors = ckd_load_tensors(load);
    ckd_error err;
    for (size_t i = 0; i < tensors->count; i++) {
        const ckd_tensor_info *t = &tensors->items[i];
        ckd_load_request r = CKD_LOAD_REQUEST_INIT;
        ckd_load_explanation *explanation;
        r.name = t->name;
        r.region = (ckd_region){
            .kind = CKD_REGION_FLAT, .start = t->elements / 4, .count = t->elements - t->elements / 2};
        if (r.region.count > BYTES_MAX / 8) {
            continue;
        }
        r.size = r.region.count * ckd_dtype_size(t->dtype);
        r.data = malloc(r.size ? r.size : 1);
        require(r.data != NULL);
        (void)ckd_load_explain(&explanation, load, &r, 1, &err);
        ckd_load_explanation_free(explanation);
        (void)ckd_load_all(load, &r, 1, ~0u, &err);
        free(r.data);
    }
}

static void load_checkpoint(ckd_store *store, const ckd_checkpoint *c, bool regions) {
    ckd_load *load;
    ckd_error err;
    if (ckd_load_begin(&load, store, &c->id, &err) == CKD_OK) {
        if (regions) {
            load_regions(load);
        } else {
            load_tensors(load);
            load_blobs(load);
        }
    }
    ckd_load_end(load);
}

static ckd_store *open_at(const char *path, ckd_open_mode mode) {
    ckd_store *store;
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_error err;
    o.threads = 1;
    o.lock_timeout_ms = 100;
    (void)ckd_store_open(&store, path, mode, &o, &err);
    return store;
}

static void list_small(ckd_store *store) {
    ckd_pin_list *pins;
    ckd_tag_list *tags;
    ckd_policy_list *policies;
    ckd_parity_status *parity;
    ckd_trash *trash;
    ckd_report *report;
    (void)ckd_store_pins(&pins, store, NULL);
    (void)ckd_store_tags(&tags, store, NULL);
    (void)ckd_store_policies(&policies, store, NULL);
    (void)ckd_store_parity_status(&parity, store, NULL);
    (void)ckd_store_trash(&trash, store, NULL);
    (void)ckd_store_report(&report, store, NULL);
    ckd_pin_list_free(pins);
    ckd_tag_list_free(tags);
    ckd_policy_list_free(policies);
    ckd_parity_status_free(parity);
    ckd_trash_free(trash);
    ckd_report_free(report);
}

static void read_all(ckd_store *store, bool regions) {
    ckd_checkpoint_list *list;
    ckd_tensor_list *tensors;
    ckd_error err;
    if (ckd_store_list(&list, store, NULL, &err) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < list->count && i < CHECKPOINTS_MAX; i++) {
        (void)ckd_store_tensors(&tensors, store, &list->items[i].id, &err);
        ckd_tensor_list_free(tensors);
        load_checkpoint(store, &list->items[i], regions);
    }
    for (size_t i = 1; i < list->count && i < CHECKPOINTS_MAX && regions; i++) {
        ckd_diff *diff;
        (void)ckd_store_diff(&diff, store, &list->items[i - 1].id, &list->items[i].id, NULL, &err);
        ckd_diff_free(diff);
    }
    ckd_checkpoint_list_free(list);
}

/* ---- calls that change the store ---- */

static void verify(ckd_store *store) {
    ckd_verify_result *found;
    (void)ckd_store_verify(&found, store, NULL, NULL);
    ckd_verify_result_free(found);
}

static void compact(ckd_store *store) {
    ckd_compaction *done;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_policy keep = CKD_POLICY_INIT;
    keep.keep_last = 1;
    o.max_depth = 1;
    o.policy = &keep;
    (void)ckd_compact(&done, store, &o, NULL);
    ckd_compaction_free(done);
}

static void repair(ckd_store *store) {
    ckd_repair_result *done;
    (void)ckd_store_repair(&done, store, NULL, NULL);
    ckd_repair_result_free(done);
}

static void copy_away(ckd_store *store) {
    ckd_copy_result *done;
    ckd_checkpoint_list *list;
    ckd_store *to = open_at(other, CKD_OPEN_CREATE);
    if (to && ckd_store_list(&list, store, NULL, NULL) == CKD_OK) {
        for (size_t i = 0; i < list->count && i < CHECKPOINTS_MAX; i++) {
            (void)ckd_copy(&done, to, store,
                           &(ckd_copy_options){.struct_size = sizeof(ckd_copy_options),
                                               .checkpoints = &list->items[i].id,
                                               .count = 1},
                           NULL);
            ckd_copy_result_free(done);
        }
        ckd_checkpoint_list_free(list);
        read_all(to, false);
    }
    ckd_store_close(to);
    remove_all(other);
}

static void delete_and_return(ckd_store *store) {
    ckd_prune *pruned;
    ckd_trash *trash;
    ckd_collected collected;
    ckd_policy keep = CKD_POLICY_INIT;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    keep.keep_last = 1;
    o.undo_s = 1000;
    all.all = 1;
    (void)ckd_store_prune(&pruned, store, &keep, &o, NULL);
    ckd_prune_free(pruned);
    if (ckd_store_trash(&trash, store, NULL) == CKD_OK && trash->count) {
        (void)ckd_store_undelete(store, &trash->items[0].checkpoint.id, 1, NULL);
    }
    ckd_trash_free(trash);
    (void)ckd_store_collect(&collected, store, &all, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 8) {
        return 0;
    }
    make_root();
    unpack(data + 1, size - 1);
    unsigned operation = data[0] % OPERATIONS;
    ckd_store *store = open_at(place, operation >= 4 ? CKD_OPEN_WRITE : CKD_OPEN_READ);
    if (store) {
        static void (*const changes[])(ckd_store *) = {verify, copy_away,         compact,
                                                       repair, delete_and_return, list_small};
        if (operation < 2) {
            read_all(store, operation == 1);
        } else {
            changes[operation - 2](store);
        }
        if (operation >= 4) {
            list_small(store);
            read_all(store, false);
        }
    }
    ckd_store_close(store);
    remove_all(place);
    return 0;
}
