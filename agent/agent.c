/* Begins an agent, accepts its connections, and ends it. */
#include "agent/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/threads.h"
#include "engine/common/common.h"

#define CONNECTIONS_MAX 256
#define PAUSE_MS        100

void agent_say(agent *a, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (a->options.on_message) {
        a->options.on_message(a->options.message_context, text);
    }
}

void agent_stop(agent *a) {
    pthread_mutex_lock(&a->mutex);
    a->stopping = true;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->mutex);
    if (a->tier) {
        tier_hurry(a->tier, true);
        peer_node_hurry(a->tier->node); /* a peer whose store hangs must not keep this agent from ending */
    }
    local_notify(a->stop);
}

/* ---- the connections ---- */

static void start_connection(agent *a, int fd) {
    pthread_t thread;
    connection *c = calloc(1, sizeof(*c));
    ckd_status status = c ? CKD_OK : CKD_E_NOMEM;
    if (status == CKD_OK) {
        *c = (connection){.agent = a, .fd = fd, .watch = local_watch_process(local_peer_process(fd))};
        pthread_mutex_lock(&a->mutex);
        status = a->threads < CONNECTIONS_MAX ? thread_start(&thread, connection_main, c, NULL) : CKD_E_BUSY;
        a->threads += status == CKD_OK;
        pthread_mutex_unlock(&a->mutex);
    }
    if (status == CKD_OK) {
        pthread_detach(thread);
        return;
    }
    local_close(c ? c->watch : -1);
    local_close(fd);
    free(c);
}

static void take_connections(agent *a) {
    int stop_fd = a->options.stop_fd > 0 ? a->options.stop_fd : -1;
    for (;;) {
        bool ready[3];
        int fd;
        local_wait((int[]){a->listener, a->stop, stop_fd}, 3, -1, ready);
        if (ready[1] || ready[2]) {
            return;
        }
        if (!ready[0]) {
            continue;
        }
        if (local_accept(&fd, a->listener, NULL) == CKD_OK) {
            start_connection(a, fd);
        } else { /* perhaps no descriptors are left; the connection still waits */
            local_wait((int[]){a->stop}, 1, PAUSE_MS, ready);
        }
    }
}

/* ---- begin and end ---- */

static ckd_status lock_socket(agent *a, ckd_error *err) {
    char path[LOCAL_PATH_MAX + 8];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    snprintf(path, sizeof(path), "%s.lock", a->socket);
    ckd_status status = lock_acquire(&a->lock, path, LOCK_EXCLUSIVE, true, 1, &why);
    lock_holder holder = {.process = 0};
    if (status == CKD_E_BUSY) {
        (void)lock_find_holder(&holder, path);
        return err_set(err, CKD_E_BUSY, "the store %s has an agent already, process %lld", a->store,
                       (long long)holder.process);
    }
    return err_from(err, status, &why);
}

/* Makes the store if there is none; reports the states that the previous agent lost. */
static ckd_status look_at_store(agent *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.on_message = a->options.on_message;
    options.message_context = a->options.message_context;
    ckd_status status = ckd_store_open(&store, a->store, CKD_OPEN_CREATE, &options, err);
    THEN(status, slots_socket_path(a->socket, a->store, a->options.socket, err));
    THEN(status, lock_socket(a, err));
    if (status == CKD_OK) {
        a->store_id = store->id;
    }
    THEN(status, ckd_id_new(&a->id, err));
    /* other nodes, or the disk, may have the states: they are asked first */
    if (status == CKD_OK && !a->options.peers && !a->options.local) {
        record_report(a, store);
    }
    ckd_store_close(store);
    return status;
}

/* An empty pool is found out now, and not when the first session asks for memory. */
static ckd_status check_huge_pages(const agent *a, ckd_error *err) {
    shared_memory one = {.fd = -1};
    if (a->options.huge_pages > CKD_HUGE_PAGES_ON) {
        return err_set(err, CKD_E_INVALID, "there is no kind %u of huge pages",
                       (unsigned)a->options.huge_pages);
    }
    ckd_status status =
        a->options.huge_pages == CKD_HUGE_PAGES_ON ? shared_memory_make(&one, 1, HUGE_PAGES_ON, err) : CKD_OK;
    shared_memory_release(&one, false);
    return status;
}

static ckd_status begin(agent *a, ckd_error *err) {
    struct stat st;
    ckd_status status = check_huge_pages(a, err);
    THEN(status, look_at_store(a, err));
    THEN(status, local_notifier(&a->stop, err));
    THEN(status, tier_open(a, err));
    THEN(status, local_listen(&a->listener, a->socket, err));
    a->socket_inode = status == CKD_OK && lstat(a->socket, &st) == 0 ? st.st_ino : 0;
    a->since_ns = clock_wall_ns();
    if (status == CKD_OK && a->options.on_ready) {
        a->options.on_ready(a->options.ready_context, a->socket);
    }
    return status;
}

/* Whether the socket is ours. If somebody removed the lock, another agent may have replaced it. */
static bool has_socket(const agent *a) {
    struct stat st;
    return a->socket_inode && lstat(a->socket, &st) == 0 && st.st_ino == a->socket_inode;
}

/* Ends the threads. Errors: IO, BUSY (a state could not be made durable). */
static ckd_status end_threads(agent *a, ckd_error *err) {
    ckd_status status = CKD_OK;
    agent_stop(a);
    pthread_mutex_lock(&a->mutex);
    while (a->threads > 0) {
        pthread_cond_wait(&a->changed, &a->mutex);
    }
    for (const holding *h = a->holdings; h && status == CKD_OK; h = h->next) {
        if (!h->settled) {
            bool on_disk = h->shown.local_step == h->shown.newest_step;
            status = err_set(err, CKD_E_IO, "step %llu of run '%s' could not be made durable, and %s: %s",
                             (unsigned long long)h->shown.newest_step, h->shown.run,
                             on_disk ? "is only on the local disk, for the next agent" : "is lost",
                             h->shown.trouble);
        }
    }
    THEN(status, holdings_assemble(a, err));
    pthread_mutex_unlock(&a->mutex);
    return status;
}

static void release(agent *a, bool durable) {
    tier_close(a, durable);
    while (a->holdings) {
        holding_remove(a, a->holdings);
    }
    if (has_socket(a)) {
        (void)file_remove(a->socket, true, NULL);
    }
    local_close(a->listener);
    local_close(a->stop);
    lock_release(a->lock);
    pthread_cond_destroy(&a->changed);
    pthread_mutex_destroy(&a->mutex);
}

static uint64_t usual_budget(void) {
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size / 2 : UINT64_C(1) << 30;
}

ckd_status ckd_agent_run(const char *store, const ckd_agent_options *options, ckd_error *err) {
    agent a = {.store = store, .listener = -1, .stop = -1};
    a.options = (ckd_agent_options)CKD_AGENT_OPTIONS_INIT;
    ckd_status status = COPY_OPTIONS(&a.options, options, "ckd_agent_options", err);
    if (status != CKD_OK || !store) {
        return status != CKD_OK ? status : err_set(err, CKD_E_INVALID, "an agent needs the path of a store");
    }
    if (!a.options.memory_bytes) {
        a.options.memory_bytes = usual_budget();
    }
    pthread_mutex_init(&a.mutex, NULL);
    pthread_cond_init(&a.changed, NULL);
    status = begin(&a, err);
    if (status == CKD_OK) {
        take_connections(&a);
        status = end_threads(&a, err);
        record_remove(&a);
    }
    release(&a, status == CKD_OK);
    return status;
}
