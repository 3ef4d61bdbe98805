/* Mounts: paths below a directory whose files are elsewhere. */
#include "base/file_op.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MOUNTS_MAX 64
#define COPY_BYTES ((size_t)8 << 20)

static struct {
    pthread_rwlock_t lock;
    pthread_once_t once;
    struct {
        const file_mount *mount;
        pid_t process; /* which added it */
    } entries[MOUNTS_MAX];
    atomic_size_t count;
} table = {.lock = PTHREAD_RWLOCK_INITIALIZER, .once = PTHREAD_ONCE_INIT};

/* Without this, a child that is forked while another thread holds the lock could not open any file. */
static void make_lock(void) {
    pthread_rwlock_init(&table.lock, NULL);
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, make_lock);
}

ckd_status file_mount_add(const file_mount *mount, ckd_error *err) {
    ckd_status status = CKD_OK;
    pthread_once(&table.once, watch_forks);
    pthread_rwlock_wrlock(&table.lock);
    size_t count = atomic_load(&table.count), at = 0;
    while (at < count && strcmp(table.entries[at].mount->root, mount->root) != 0) {
        at++;
    }
    /* A forked child replaces the mount of its parent, which it cannot use. */
    if (at < count && table.entries[at].process == getpid()) {
        status = err_set(err, CKD_E_EXISTS, "%s is mounted already", mount->root);
    } else if (at == MOUNTS_MAX) {
        status =
            err_set(err, CKD_E_NOMEM, "a process can use at most %d stores in buckets at a time", MOUNTS_MAX);
    } else {
        table.entries[at].mount = mount;
        table.entries[at].process = getpid();
        atomic_store(&table.count, at == count ? count + 1 : count);
    }
    pthread_rwlock_unlock(&table.lock);
    return status;
}

void file_mount_remove(const file_mount *mount) {
    pthread_rwlock_wrlock(&table.lock);
    size_t count = atomic_load(&table.count), kept = 0;
    for (size_t i = 0; i < count; i++) {
        if (table.entries[i].mount != mount) {
            table.entries[kept++] = table.entries[i];
        }
    }
    atomic_store(&table.count, kept);
    pthread_rwlock_unlock(&table.lock);
}

mounted mount_of(const char *path) {
    mounted out = {.mount = NULL, .kind = MOUNT_LOCAL};
    if (atomic_load_explicit(&table.count, memory_order_relaxed) == 0) {
        return out;
    }
    pthread_rwlock_rdlock(&table.lock);
    for (size_t i = 0; i < atomic_load(&table.count) && !out.mount; i++) {
        const file_mount *m = table.entries[i].mount;
        size_t length = strlen(m->root);
        if (strncmp(path, m->root, length) == 0 && path[length] == '/') {
            out = (mounted){.mount = m, .name = path + length + 1};
        }
    }
    pthread_rwlock_unlock(&table.lock);
    if (out.mount) {
        out.kind = out.mount->kind(out.name);
    }
    return out;
}

bool file_is_remote(const char *path) {
    return mount_of(path).kind == MOUNT_REMOTE;
}

static ckd_status copy_content(file_writer *to, file_reader *from, ckd_error *err) {
    uint64_t size = file_size(from);
    uint8_t *buffer = malloc(COPY_BYTES);
    ckd_status status = buffer ? CKD_OK : err_nomem(err, COPY_BYTES, "a file's content");
    for (uint64_t at = 0; at < size && status == CKD_OK;) {
        size_t part = size - at < COPY_BYTES ? (size_t)(size - at) : COPY_BYTES;
        status = file_read_at(from, at, buffer, part, err);
        THEN(status, file_append(to, buffer, part, err));
        at += part;
    }
    free(buffer);
    return status;
}

/* Makes a local file of a remote one. `to` must not exist. */
static ckd_status fetch(const char *from, const char *to, ckd_error *err) {
    file_reader *source;
    file_writer *writer = NULL;
    ckd_status status = file_open_read(&source, from, err);
    if (status != CKD_OK) {
        return status;
    }
    status = file_create(&writer, to, 0, err);
    THEN(status, copy_content(writer, source, err));
    THEN(status, file_sync(writer, err));
    file_close_read(source);
    if (status != CKD_OK) {
        file_discard(writer);
        return status;
    }
    status = file_close(writer, err);
    if (status != CKD_OK) {
        (void)file_remove(to, true, NULL);
    }
    return status;
}

/* Gives a local file the content of another name, without replacing anything. */
static ckd_status make_local(const mounted *m, const char *from, const char *to, ckd_error *err) {
    if (m->kind == MOUNT_REMOTE) {
        return fetch(from, to, err);
    }
    ckd_status status = m->mount->compare(m->mount->context, m->name, err);
    if (status == CKD_OK && link(from, to) != 0) {
        status = err_sys(err, errno, to, "cannot give %s the name %s as well", from, to);
    }
    return status;
}

/* Both names are of the place. The content takes the way through a local file. */
static ckd_status move_within(const mounted *from, const char *from_path, const mounted *to, bool replaces,
                              ckd_error *err) {
    char local[4200];
    uint8_t random[8];
    ckd_status status = random_bytes(random, sizeof(random), err);
    uint64_t number = load_le64(random);
    snprintf(local, sizeof(local), "%.4096s.tmp-%016llx", to->mount->root, (unsigned long long)number);
    THEN(status, make_local(from, from_path, local, err));
    if (status != CKD_OK) {
        return status;
    }
    status = to->mount->put(to->mount->context, to->name, local, replaces, err);
    if (status != CKD_OK) {
        (void)file_remove(local, true, NULL);
        return status;
    }
    return from->mount->remove(from->mount->context, from->name, err);
}

ckd_status mount_rename(const char *from, const char *to, bool replaces, ckd_error *err) {
    mounted f = mount_of(from), t = mount_of(to);
    if (f.kind == MOUNT_LOCAL) {
        return t.mount->put(t.mount->context, t.name, from, replaces, err);
    }
    if (t.kind != MOUNT_LOCAL) {
        return move_within(&f, from, &t, replaces, err);
    }
    /* If the removal fails, it may have happened nevertheless: the local file stays. */
    ckd_status status = replaces ? file_remove(to, true, err) : CKD_OK;
    THEN(status, make_local(&f, from, to, err));
    THEN(status, file_sync_parent(to, err));
    THEN(status, f.mount->remove(f.mount->context, f.name, err));
    return status;
}

ckd_status mount_link(const char *from, const char *to, ckd_error *err) {
    mounted f = mount_of(from), t = mount_of(to);
    if (t.kind == MOUNT_LOCAL) {
        return make_local(&f, from, to, err);
    }
    return err_set(err, CKD_E_UNSUPPORTED, "%s cannot get a second name: the place of %s has none", from, to);
}
