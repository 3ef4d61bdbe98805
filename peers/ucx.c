/*
 * Bytes between two processes over UCX: its stream interface, with endpoints that report the failure of the peer. UCX
 * chooses among networks that bypass the kernel (RDMA). Each link has a worker of its own, so one thread waits for one
 * peer only. The library is opened when it is needed.
 */
#include "peers/internal.h"

#include <stdlib.h>

#ifdef __has_include
#if __has_include(<ucp/api/ucp.h>)
#define WITH_UCX
#endif
#endif

/* NULL: the default. */
static const char *chosen_transports(void) {
    const char *chosen = secure_getenv("CKD_UCX_TLS");
    return chosen && chosen[0] ? chosen : NULL;
}

static ckd_status no_ucx(ckd_error *err) {
    return err_set(err, CKD_E_UNSUPPORTED,
                   "CKD_UCX_TLS is set, but there is no UCX, or this ckptdelta was built without it");
}

#ifdef WITH_UCX

#include <dlfcn.h>
#include <ucp/api/ucp.h>

#include "base/file.h"
#include "base/local_socket.h"

#define LOOK_MS  100                     /* between two looks at whether a wait should end */
#define CLOSE_MS 1000                    /* the end of a connection takes no longer */
#define DEVICES  "/sys/class/infiniband" /* for RDMA */
/* All but what is no network, and but TCP: the TCP of UCX 1.13 aborts the process when a peer ends at a bad moment. */
#define FAST           "^tcp,self,shm,cuda,rocm,ze"
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
    FUNCTION(worker_get_address);
    FUNCTION(worker_release_address);
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
    PLACE(init_version),
    PLACE(config_read),
    PLACE(config_modify),
    PLACE(config_release),
    PLACE(cleanup),
    PLACE(worker_create),
    PLACE(worker_destroy),
    PLACE(worker_progress),
    PLACE(worker_get_efd),
    PLACE(worker_arm),
    PLACE(worker_get_address),
    PLACE(worker_release_address),
    PLACE(ep_create),
    PLACE(ep_close_nbx),
    PLACE(stream_send_nbx),
    PLACE(stream_recv_nbx),
    PLACE(request_check_status),
    PLACE(request_free),
    {"ucs_status_string", offsetof(__typeof__(ucx), status_string)},
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

/* ---- this process ---- */

struct ucx_net {
    ucp_context_h context;
};

static ucs_status_t open_context(ucp_context_h *out, const char *transports) {
    ucp_config_t *config;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
                           .features = UCP_FEATURE_STREAM | UCP_FEATURE_WAKEUP,
                           .mt_workers_shared = 1};
    ucs_status_t status = ucx.config_read(NULL, NULL, &config);
    if (status == UCS_OK) {
        status = ucx.config_modify(config, "TLS", transports);
        status =
            status == UCS_OK ? ucx.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, out) : status;
        ucx.config_release(config);
    }
    return status;
}

/* Without a device UCX would only print that it has none. */
static bool has_device(void) {
    dir_list devices;
    if (dir_list_read(&devices, DEVICES, NULL) != CKD_OK) {
        return false;
    }
    bool some = devices.count > 0;
    dir_list_free(&devices);
    return some;
}

ckd_status ucx_open(ucx_net **out, ckd_error *err) {
    const char *chosen = chosen_transports();
    *out = NULL;
    if (chosen ? strcmp(chosen, "none") == 0 : !has_device()) {
        return CKD_OK;
    }
    (void)pthread_once(&once, find_ucx);
    if (!found) {
        return chosen ? no_ucx(err) : CKD_OK;
    }
    ucx_net *net = calloc(1, sizeof(*net));
    if (!net) {
        return err_nomem(err, sizeof(*net), "UCX");
    }
    ucs_status_t status = open_context(&net->context, chosen ? chosen : FAST);
    if (status != UCS_OK) {
        free(net);
        return chosen ? fail(err, status, "UCX does not start with CKD_UCX_TLS") : CKD_OK;
    }
    *out = net;
    return CKD_OK;
}

void ucx_close(ucx_net *net) {
    if (net) {
        ucx.cleanup(net->context);
        free(net);
    }
}

/* ---- links ---- */

struct ucx_link {
    ucp_worker_h worker;
    int ready;         /* readable: there may be progress; the worker's own */
    int socket;        /* readable: the peer is gone; the caller's */
    ucp_ep_h endpoint; /* NULL: not yet, or closed */
    ucs_status_t failed;
};

/* Makes progress, or sleeps until there may be some, `stop` is readable, or a moment has passed. */
static bool step(ucx_link *l, int stop) {
    bool ready[3] = {false, false, false};
    if (ucx.worker_progress(l->worker) == 0 && ucx.worker_arm(l->worker) == UCS_OK) {
        local_wait((int[]){l->ready, stop, l->failed == UCS_OK ? l->socket : -1}, 3, LOOK_MS, ready);
    }
    /* the peer has closed the socket; what it sent before that is taken first */
    if (ready[2] && ucx.worker_progress(l->worker) == 0) {
        l->failed = UCS_ERR_CONNECTION_RESET;
    }
    return !ready[1];
}

static void on_failure(void *context, ucp_ep_h endpoint, ucs_status_t status) {
    ucx_link *l = context;
    (void)endpoint;
    l->failed = status;
}

/* Gives up what is on its way: whoever has sent a request has its answer, or does not want it any more. */
static void close_endpoint(ucx_link *l) {
    if (!l->endpoint) {
        return;
    }
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    void *request = ucx.ep_close_nbx(l->endpoint, &params);
    uint64_t end_ns = clock_monotonic_ns() + CLOSE_MS * UINT64_C(1000000);
    l->endpoint = NULL;
    if (!UCS_PTR_IS_PTR(request)) {
        return;
    }
    while (ucx.request_check_status(request) == UCS_INPROGRESS && clock_monotonic_ns() < end_ns) {
        (void)step(l, -1);
    }
    ucx.request_free(request);
}

/* Fails a send or receive. The caller's memory is not touched after that. */
static ckd_status give_up(ucx_link *l, void *request, ckd_error *err, ckd_status status, const char *why) {
    close_endpoint(l);
    if (request) {
        ucx.request_free(request);
    }
    return err_set(err, status, "%s", why);
}

static ckd_status await(ucx_link *l, ucs_status_ptr_t request, const wire_limits *limits, ckd_error *err) {
    if (request == NULL) {
        return CKD_OK;
    }
    if (UCS_PTR_IS_ERR(request)) {
        return give_up(l, NULL, err, CKD_E_IO, ucx.status_string(UCS_PTR_STATUS(request)));
    }
    uint64_t end_ns = wire_limits_end(limits);
    ucs_status_t status;
    while ((status = ucx.request_check_status(request)) == UCS_INPROGRESS) {
        ckd_error why;
        if (l->failed != UCS_OK) {
            return give_up(l, request, err, CKD_E_IO, ucx.status_string(l->failed));
        }
        ckd_status ends = wire_limits_check(limits, end_ns, &why);
        if (ends != CKD_OK) {
            return give_up(l, request, err, ends, why.message);
        }
        if (!step(l, limits->stop)) {
            return give_up(l, request, err, CKD_E_CANCELLED, "the agent is ending");
        }
    }
    if (status != UCS_OK) {
        return give_up(l, request, err, CKD_E_IO, ucx.status_string(status));
    }
    ucx.request_free(request);
    return CKD_OK;
}

static ckd_status check_open(ucx_link *l, ckd_error *err) {
    if (!l->endpoint || l->failed != UCS_OK) {
        return give_up(l, NULL, err, CKD_E_IO, l->failed != UCS_OK ? ucx.status_string(l->failed) : "closed");
    }
    return CKD_OK;
}

ckd_status ucx_send(ucx_link *l, const void *data, size_t size, const wire_limits *limits, ckd_error *err) {
    ucp_request_param_t params = {.op_attr_mask = 0};
    ckd_status status = check_open(l, err);
    return status == CKD_OK ? await(l, ucx.stream_send_nbx(l->endpoint, data, size, &params), limits, err)
                            : status;
}

ckd_status ucx_receive(ucx_link *l, void *to, size_t size, const wire_limits *limits, ckd_error *err) {
    size_t length = 0;
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_RECV_INFO,
                                  .flags = UCP_STREAM_RECV_FLAG_WAITALL,
                                  .recv_info.length = &length};
    ckd_status status = check_open(l, err);
    if (status == CKD_OK && size) {
        status = await(l, ucx.stream_recv_nbx(l->endpoint, to, size, &length, &params), limits, err);
    }
    return status;
}

/* ---- begin and end ---- */

static ucs_status_t open_worker(ucx_link *l, const ucx_net *net, bytes *address) {
    ucp_address_t *own;
    size_t size;
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t status = ucx.worker_create(net->context, &params, &l->worker);
    if (status != UCS_OK) {
        l->worker = NULL;
        return status;
    }
    status = ucx.worker_get_efd(l->worker, &l->ready);
    status = status == UCS_OK ? ucx.worker_get_address(l->worker, &own, &size) : status;
    if (status == UCS_OK) {
        bytes_put(address, own, size);
        ucx.worker_release_address(l->worker, own);
    }
    return status;
}

ckd_status ucx_link_open(ucx_link **out, bytes *address, ucx_net *net, int socket, ckd_error *err) {
    ucx_link *l = calloc(1, sizeof(*l));
    *out = NULL;
    if (!l) {
        return err_nomem(err, sizeof(*l), "a connection");
    }
    l->socket = socket;
    ucs_status_t status = open_worker(l, net, address);
    if (status != UCS_OK) {
        ucx_link_close(l);
        return fail(err, status, "UCX has no worker");
    }
    *out = l;
    return CKD_OK;
}

ckd_status ucx_link_connect(ucx_link *l, const bytes *address, ckd_error *err) {
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                              .address = (const ucp_address_t *)address->data,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {on_failure, l}};
    ucs_status_t made = ucx.ep_create(l->worker, &params, &l->endpoint);
    if (made != UCS_OK) {
        l->endpoint = NULL;
        return fail(err, made, "UCX cannot reach the other node");
    }
    return CKD_OK;
}

void ucx_link_close(ucx_link *l) {
    if (l) {
        close_endpoint(l);
        if (l->worker) {
            ucx.worker_destroy(l->worker);
        }
        free(l);
    }
}

#else /* connections stay on their sockets: there is no link */

ckd_status ucx_open(ucx_net **out, ckd_error *err) {
    *out = NULL;
    return chosen_transports() ? no_ucx(err) : CKD_OK;
}

void ucx_close(ucx_net *net) {
    (void)net;
}

ckd_status ucx_link_open(ucx_link **out, bytes *address, ucx_net *net, int socket, ckd_error *err) {
    (void)address, (void)net, (void)socket;
    *out = NULL;
    return no_ucx(err);
}

ckd_status ucx_link_connect(ucx_link *l, const bytes *address, ckd_error *err) {
    (void)l, (void)address;
    return no_ucx(err);
}

ckd_status ucx_send(ucx_link *l, const void *data, size_t size, const wire_limits *limits, ckd_error *err) {
    (void)l, (void)data, (void)size, (void)limits;
    return no_ucx(err);
}

ckd_status ucx_receive(ucx_link *l, void *to, size_t size, const wire_limits *limits, ckd_error *err) {
    (void)l, (void)to, (void)size, (void)limits;
    return no_ucx(err);
}

void ucx_link_close(ucx_link *l) {
    (void)l;
}

#endif
