/*
 * Bytes between two processes, over UCX: its stream interface, with endpoints that report the failure of the peer. UCX
 * chooses the transport (shared memory, TCP, RDMA). Each connection has a worker of its own, so one thread waits for one
 * peer only. The library is opened when it is needed.
 */
#include "peers/internal.h"

#include <stdlib.h>

#ifdef __has_include
#if __has_include(<ucp/api/ucp.h>)
#define WITH_UCX
#endif
#endif

#ifdef WITH_UCX

#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <sys/socket.h>
#include <ucp/api/ucp.h>

#include "base/file.h"
#include "base/local_socket.h"

#define LOOK_MS        100  /* between two looks at whether a wait should end */
#define CLOSE_MS       1000 /* the end of a connection takes no longer */
#define WAITING_MAX    64
#define FUNCTION(NAME) __typeof__(&ucp_##NAME) NAME

/* ---- the library ---- */

static struct {
    FUNCTION(init_version);
    FUNCTION(config_read);
    FUNCTION(config_modify);
    FUNCTION(config_release);
    FUNCTION(cleanup);
    FUNCTION(worker_create);
    FUNCTION(worker_destroy);
    FUNCTION(worker_progress);
    FUNCTION(worker_get_efd);
    FUNCTION(worker_arm);
    FUNCTION(listener_create);
    FUNCTION(listener_destroy);
    FUNCTION(listener_reject);
    FUNCTION(ep_create);
    FUNCTION(ep_close_nbx);
    FUNCTION(stream_send_nbx);
    FUNCTION(stream_recv_nbx);
    FUNCTION(request_check_status);
    FUNCTION(request_free);
    __typeof__(&ucs_status_string) status_string;
} ucx;

static const struct {
    const char *name;
    size_t place;
} functions[] = {
#define PLACE(NAME) \
    { "ucp_" #NAME, offsetof(__typeof__(ucx), NAME) }
    PLACE(init_version),    PLACE(config_read),
    PLACE(config_modify),   PLACE(config_release),
    PLACE(cleanup),         PLACE(worker_create),
    PLACE(worker_destroy),  PLACE(worker_progress),
    PLACE(worker_get_efd),  PLACE(worker_arm),
    PLACE(listener_create), PLACE(listener_destroy),
    PLACE(listener_reject), PLACE(ep_create),
    PLACE(ep_close_nbx),    PLACE(stream_send_nbx),
    PLACE(stream_recv_nbx), PLACE(request_check_status),
    PLACE(request_free),    {"ucs_status_string", offsetof(__typeof__(ucx), status_string)},
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool found;

static void find_ucx(void) {
    const char *path = secure_getenv("CKD_UCX");
    void *library = dlopen(path && path[0] ? path : "libucp.so.0", RTLD_NOW | RTLD_LOCAL);
    found = library != NULL;
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]) && found; i++) {
        void *function = dlsym(library, functions[i].name);
        memcpy((char *)&ucx + functions[i].place, &function, sizeof(function));
        found = function != NULL;
    }
}

static ckd_status fail(ckd_error *err, ucs_status_t status, const char *what) {
    return err_set(err, status == UCS_ERR_NO_MEMORY ? CKD_E_NOMEM : CKD_E_IO, "%s: %s", what,
                   ucx.status_string(status));
}

struct wire_net {
    ucp_context_h context;
};

ckd_status wire_net_open(wire_net **out, ckd_error *err) {
    (void)pthread_once(&once, find_ucx);
    if (!found) {
        return err_set(
            err, CKD_E_UNSUPPORTED,
            "agents of several nodes need UCX, and there is no libucp.so.0 of version %u.%u or later here: "
            "install it (Debian: libucx0), or name it in CKD_UCX",
            UCP_API_MAJOR, UCP_API_MINOR);
    }
    wire_net *net = calloc(1, sizeof(*net));
    ucp_config_t *config;
    if (!net) {
        return err_nomem(err, sizeof(*net), "UCX");
    }
    ucs_status_t status = ucx.config_read(NULL, NULL, &config);
    if (status == UCS_OK) {
        /* an agent that was killed is started again at its address at once; transports without the setting go on */
        (void)ucx.config_modify(config, "CM_REUSEADDR", "y");
        if (!getenv(
                "UCX_TLS")) { /* peers are on other nodes, and shared memory outlives a process that is killed */
            (void)ucx.config_modify(config, "TLS", "^shm");
        }
        ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
                               .features = UCP_FEATURE_STREAM | UCP_FEATURE_WAKEUP,
                               .mt_workers_shared = 1};
        status = ucx.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &net->context);
        ucx.config_release(config);
    }
    if (status != UCS_OK) {
        free(net);
        return fail(err, status, "UCX does not start");
    }
    *out = net;
    return CKD_OK;
}

void wire_net_close(wire_net *net) {
    if (net) {
        ucx.cleanup(net->context);
        free(net);
    }
}

/* ---- workers ---- */

typedef struct worker {
    ucp_worker_h handle;
    int ready; /* readable: there may be progress; the worker's own */
} worker;

static ckd_status worker_open(worker *out, wire_net *net, ckd_error *err) {
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t status = ucx.worker_create(net->context, &params, &out->handle);
    if (status != UCS_OK) {
        out->handle = NULL;
        return fail(err, status, "UCX has no worker");
    }
    status = ucx.worker_get_efd(out->handle, &out->ready);
    return status == UCS_OK ? CKD_OK : fail(err, status, "UCX cannot wait");
}

static void worker_close(worker *w) {
    if (w->handle) {
        ucx.worker_destroy(w->handle);
        w->handle = NULL;
    }
}

/* Makes progress, or sleeps until there may be some, `stop` is readable, or a moment has passed. */
static bool worker_step(const worker *w, int stop) {
    bool ready[2] = {false, false};
    if (ucx.worker_progress(w->handle) == 0 && ucx.worker_arm(w->handle) == UCS_OK) {
        local_wait((int[]){w->ready, stop}, 2, LOOK_MS, ready);
    }
    return !ready[1];
}

/* ---- connections ---- */

struct wire {
    worker worker;
    ucp_ep_h endpoint; /* NULL: closed */
    ucs_status_t failed;
    wire_limits limits;
};

static void on_failure(void *context, ucp_ep_h endpoint, ucs_status_t status) {
    wire *w = context;
    (void)endpoint;
    w->failed = status;
}

/* Gives up what is on its way: whoever has sent a request has its answer, or does not want it any more. */
static void close_endpoint(wire *w) {
    if (!w->endpoint) {
        return;
    }
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    void *request = ucx.ep_close_nbx(w->endpoint, &params);
    uint64_t end_ns = clock_monotonic_ns() + CLOSE_MS * UINT64_C(1000000);
    w->endpoint = NULL;
    if (!UCS_PTR_IS_PTR(request)) {
        return;
    }
    while (ucx.request_check_status(request) == UCS_INPROGRESS && clock_monotonic_ns() < end_ns) {
        (void)worker_step(&w->worker, -1);
    }
    ucx.request_free(request);
}

/* Fails a send or receive. The caller's memory is not touched after that. */
static ckd_status give_up(wire *w, void *request, ckd_error *err, ckd_status status, const char *why) {
    close_endpoint(w);
    if (request) {
        ucx.request_free(request);
    }
    return err_set(err, status, "%s", why);
}

static ckd_status await(wire *w, ucs_status_ptr_t request, ckd_error *err) {
    if (request == NULL) {
        return CKD_OK;
    }
    if (UCS_PTR_IS_ERR(request)) {
        return give_up(w, NULL, err, CKD_E_IO, ucx.status_string(UCS_PTR_STATUS(request)));
    }
    uint64_t end_ns = clock_monotonic_ns() + w->limits.silence_ms * UINT64_C(1000000);
    ucs_status_t status;
    while ((status = ucx.request_check_status(request)) == UCS_INPROGRESS) {
        if (w->failed != UCS_OK) {
            return give_up(w, request, err, CKD_E_IO, ucx.status_string(w->failed));
        }
        if (w->limits.lost && w->limits.lost(w->limits.peer)) {
            return give_up(w, request, err, CKD_E_IO, "it shows no sign of life any more");
        }
        if (w->limits.silence_ms && clock_monotonic_ns() > end_ns) {
            return give_up(w, request, err, CKD_E_BUSY, "it shows no sign of life");
        }
        if (!worker_step(&w->worker, w->limits.stop)) {
            return give_up(w, request, err, CKD_E_CANCELLED, "the agent is ending");
        }
    }
    if (status != UCS_OK) {
        return give_up(w, request, err, CKD_E_IO, ucx.status_string(status));
    }
    ucx.request_free(request);
    return CKD_OK;
}

static ckd_status check_open(wire *w, ckd_error *err) {
    if (!w->endpoint || w->failed != UCS_OK) {
        return give_up(w, NULL, err, CKD_E_IO, w->failed != UCS_OK ? ucx.status_string(w->failed) : "closed");
    }
    return CKD_OK;
}

ckd_status wire_send(wire *w, const void *data, size_t size, ckd_error *err) {
    ucp_request_param_t params = {.op_attr_mask = 0};
    ckd_status status = check_open(w, err);
    return status == CKD_OK ? await(w, ucx.stream_send_nbx(w->endpoint, data, size, &params), err) : status;
}

static wire_fault_fn fault_hook;
static void *fault_context;

void wire_set_fault(wire_fault_fn fault, void *context) {
    fault_hook = fault;
    fault_context = context;
}

ckd_status wire_receive(wire *w, void *to, size_t size, ckd_error *err) {
    size_t length = 0;
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_RECV_INFO,
                                  .flags = UCP_STREAM_RECV_FLAG_WAITALL,
                                  .recv_info.length = &length};
    ckd_status status = check_open(w, err);
    if (status == CKD_OK && size) {
        status = await(w, ucx.stream_recv_nbx(w->endpoint, to, size, &length, &params), err);
    }
    if (status == CKD_OK && fault_hook) {
        fault_hook(fault_context, to, size);
    }
    return status;
}

static ckd_status wire_make(wire **out, wire_net *net, ucp_ep_params_t *params, ckd_error *err) {
    wire *w = calloc(1, sizeof(*w));
    if (!w) {
        return err_nomem(err, sizeof(*w), "a connection");
    }
    w->limits.stop = -1;
    ckd_status status = worker_open(&w->worker, net, err);
    if (status == CKD_OK) {
        params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
        params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
        params->err_handler = (ucp_err_handler_t){on_failure, w};
        ucs_status_t made = ucx.ep_create(w->worker.handle, params, &w->endpoint);
        if (made != UCS_OK) {
            w->endpoint = NULL;
            status = fail(err, made, "there is no connection");
        }
    }
    if (status != CKD_OK) {
        worker_close(&w->worker);
        free(w);
        return status;
    }
    *out = w;
    return CKD_OK;
}

void wire_close(wire *w) {
    if (w) {
        close_endpoint(w);
        worker_close(&w->worker);
        free(w);
    }
}

void wire_set_limits(wire *w, const wire_limits *limits) {
    w->limits = *limits;
}

static ckd_status resolve(struct addrinfo **out, const peer_host *at, ckd_error *err) {
    char port[8];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    snprintf(port, sizeof(port), "%u", (unsigned)at->port);
    int failed = getaddrinfo(at->host, port, &hints, out);
    return failed
               ? err_set(err, CKD_E_INVALID, "%s is no address of a node: %s", at->name, gai_strerror(failed))
               : CKD_OK;
}

ckd_status wire_connect(wire **out, wire_net *net, const peer_host *to, const wire_limits *limits,
                        ckd_error *err) {
    struct addrinfo *address;
    ckd_status status = resolve(&address, to, err);
    if (status != CKD_OK) {
        return status;
    }
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
                              .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
                              .sockaddr = {address->ai_addr, address->ai_addrlen}};
    status = wire_make(out, net, &params, err);
    freeaddrinfo(address);
    if (status == CKD_OK) {
        (*out)->limits = *limits;
    }
    return status;
}

/* ---- listeners ---- */

struct wire_listener {
    wire_net *net;
    worker worker;
    ucp_listener_h handle;
    ucp_conn_request_h waiting[WAITING_MAX];
    size_t count;
};

static void on_request(ucp_conn_request_h request, void *context) {
    wire_listener *l = context;
    if (l->count < WAITING_MAX) {
        l->waiting[l->count++] = request;
    } else {
        (void)ucx.listener_reject(l->handle, request);
    }
}

ckd_status wire_listen(wire_listener **out, wire_net *net, const peer_host *at, ckd_error *err) {
    struct addrinfo *address;
    wire_listener *l = calloc(1, sizeof(*l));
    if (!l) {
        return err_nomem(err, sizeof(*l), "a listener");
    }
    l->net = net;
    ckd_status status = worker_open(&l->worker, net, err);
    THEN(status, resolve(&address, at, err));
    if (status == CKD_OK) {
        ucp_listener_params_t params = {.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR |
                                                      UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
                                        .sockaddr = {address->ai_addr, address->ai_addrlen},
                                        .conn_handler = {on_request, l}};
        ucs_status_t made = ucx.listener_create(l->worker.handle, &params, &l->handle);
        freeaddrinfo(address);
        if (made != UCS_OK) {
            l->handle = NULL;
            status = err_set(err, CKD_E_IO, "this node cannot listen at %s: %s", at->name,
                             ucx.status_string(made));
        }
    }
    if (status != CKD_OK) {
        wire_listener_close(l);
        return status;
    }
    *out = l;
    return CKD_OK;
}

void wire_listener_close(wire_listener *l) {
    if (!l) {
        return;
    }
    for (size_t i = 0; i < l->count; i++) {
        (void)ucx.listener_reject(l->handle, l->waiting[i]);
    }
    if (l->handle) {
        ucx.listener_destroy(l->handle);
    }
    worker_close(&l->worker);
    free(l);
}

ckd_status wire_accept(wire **out, wire_listener *l, int stop, ckd_error *err) {
    while (l->count == 0) {
        if (!worker_step(&l->worker, stop)) {
            return err_set(err, CKD_E_CANCELLED, "the agent is ending");
        }
    }
    ucp_conn_request_h request = l->waiting[0];
    l->count--;
    memmove(l->waiting, l->waiting + 1, l->count * sizeof(l->waiting[0]));
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST, .conn_request = request};
    return wire_make(out, l->net, &params, err);
}

#else

ckd_status wire_net_open(wire_net **out, ckd_error *err) {
    *out = NULL;
    return err_set(
        err, CKD_E_UNSUPPORTED,
        "agents of several nodes need UCX, and this ckptdelta was built without it: install its headers (Debian: "
        "libucx-dev) and build again");
}

static ckd_status unsupported(ckd_error *err) {
    wire_net *none;
    return wire_net_open(&none, err);
}

void wire_net_close(wire_net *net) {
    (void)net;
}

ckd_status wire_listen(wire_listener **out, wire_net *net, const peer_host *at, ckd_error *err) {
    (void)out, (void)net, (void)at;
    return unsupported(err);
}

void wire_listener_close(wire_listener *l) {
    (void)l;
}

ckd_status wire_accept(wire **out, wire_listener *l, int stop, ckd_error *err) {
    (void)out, (void)l, (void)stop;
    return unsupported(err);
}

ckd_status wire_connect(wire **out, wire_net *net, const peer_host *to, const wire_limits *limits,
                        ckd_error *err) {
    (void)out, (void)net, (void)to, (void)limits;
    return unsupported(err);
}

void wire_set_limits(wire *w, const wire_limits *limits) {
    (void)w, (void)limits;
}

ckd_status wire_send(wire *w, const void *data, size_t size, ckd_error *err) {
    (void)w, (void)data, (void)size;
    return unsupported(err);
}

ckd_status wire_receive(wire *w, void *to, size_t size, ckd_error *err) {
    (void)w, (void)to, (void)size;
    return unsupported(err);
}

void wire_close(wire *w) {
    (void)w;
}

void wire_set_fault(wire_fault_fn fault, void *context) {
    (void)fault, (void)context;
}

#endif
