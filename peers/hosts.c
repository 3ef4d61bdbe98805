/* The list of nodes, and who keeps copies for whom. */
#include "peers/peers.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/file.h"

#define LIST_MAX (1u << 20)

/* ---- one entry ---- */

static ckd_status parse_address(peer_host *out, const char *text, ckd_error *err) {
    const char *colon = strrchr(text, ':');
    char *end = NULL;
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : 0;
    size_t length = colon ? (size_t)(colon - text) : 0;
    bool bracketed = length > 2 && text[0] == '[' && text[length - 1] == ']';
    if (!colon || !end || *end || colon[1] < '0' || colon[1] > '9' || port < 1 || port > 65535 ||
        length == 0 || strlen(text) > PEER_NAME_MAX || (!bracketed && memchr(text, ':', length))) {
        return err_set(err, CKD_E_INVALID,
                       "a node is HOST:PORT, such as node7:7070 or [fd00::7]:7070, not '%.100s'", text);
    }
    snprintf(out->name, sizeof(out->name), "%s", text);
    snprintf(out->host, sizeof(out->host), "%.*s", (int)(length - 2 * bracketed), text + bracketed);
    out->port = (uint16_t)port;
    return CKD_OK;
}

static ckd_status parse_word(peer_host *host, const char *word, ckd_error *err) {
    size_t length = strlen(word);
    if (strncmp(word, "domain=", 7) != 0 || length == 7 || length - 7 > PEER_DOMAIN_MAX) {
        return err_set(err, CKD_E_INVALID,
                       "only domain=NAME, of at most %d bytes, may follow a node's address, not '%.100s'",
                       PEER_DOMAIN_MAX, word);
    }
    snprintf(host->domain, sizeof(host->domain), "%.*s", PEER_DOMAIN_MAX, word + 7);
    return CKD_OK;
}

static ckd_status add(peer_hosts *out, const peer_host *host, ckd_error *err) {
    for (size_t i = 0; i < out->count; i++) {
        if (strcmp(out->items[i].name, host->name) == 0) {
            return err_set(err, CKD_E_INVALID, "the node %s is in the list twice", host->name);
        }
    }
    if (out->count == PEER_HOSTS_MAX) {
        return err_set(err, CKD_E_INVALID, "the list has more than %d nodes", PEER_HOSTS_MAX);
    }
    out->items[out->count++] = *host;
    return CKD_OK;
}

static ckd_status parse_line(peer_hosts *out, char *line, ckd_error *err) {
    char *rest = NULL;
    line[strcspn(line, "#\r")] = '\0';
    char *word = strtok_r(line, " \t", &rest);
    if (!word) {
        return CKD_OK;
    }
    peer_host host = {.port = 0};
    ckd_status status = parse_address(&host, word, err);
    while (status == CKD_OK && (word = strtok_r(NULL, " \t", &rest))) {
        status = parse_word(&host, word, err);
    }
    THEN(status, add(out, &host, err));
    return status;
}

static ckd_status parse(peer_hosts *out, char *text, const char *separators, const char *from,
                        ckd_error *err) {
    ckd_error why;
    unsigned number = 1;
    ckd_status status = CKD_OK;
    for (char *line = text; line && status == CKD_OK; number++) {
        char *end = strpbrk(line, separators);
        char *next = end ? end + 1 : NULL;
        if (end) {
            *end = '\0';
        }
        status = parse_line(out, line, &why);
        line = next;
    }
    return status != CKD_OK ? err_set(err, status, "%s, entry %u: %.400s", from, number - 1, why.message)
                            : CKD_OK;
}

/* ---- which one is this node? ---- */

static bool same_address(const struct sockaddr *a, const struct sockaddr *b) {
    if (!a || !b || a->sa_family != b->sa_family) {
        return false;
    }
    if (a->sa_family == AF_INET) {
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    }
    return a->sa_family == AF_INET6 && memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                                              &((const struct sockaddr_in6 *)b)->sin6_addr, 16) == 0;
}

static bool is_here(const peer_host *host, const struct ifaddrs *own) {
    struct addrinfo *found = NULL, hints = {.ai_socktype = SOCK_STREAM};
    bool here = false;
    if (getaddrinfo(host->host, NULL, &hints, &found) != 0) {
        return false;
    }
    for (const struct addrinfo *f = found; f && !here; f = f->ai_next) {
        for (const struct ifaddrs *o = own; o && !here; o = o->ifa_next) {
            here = same_address(f->ai_addr, o->ifa_addr);
        }
    }
    freeaddrinfo(found);
    return here;
}

static ckd_status find_self(peer_hosts *hosts, const char *self, ckd_error *err) {
    struct ifaddrs *own = NULL;
    size_t matches = 0;
    if (!self && getifaddrs(&own) != 0) {
        own = NULL;
    }
    for (size_t i = 0; i < hosts->count; i++) {
        bool here = self ? strcmp(hosts->items[i].name, self) == 0 : is_here(&hosts->items[i], own);
        hosts->self = here ? i : hosts->self;
        matches += here;
    }
    if (own) {
        freeifaddrs(own);
    }
    if (matches == 1) {
        return CKD_OK;
    }
    if (self) {
        return err_set(err, CKD_E_INVALID, "the list of nodes does not contain %s", self);
    }
    return err_set(err, CKD_E_INVALID, "%s of the nodes in the list is this machine: name its HOST:PORT",
                   matches ? "more than one" : "none");
}

ckd_status peer_hosts_read(peer_hosts *out, const char *list, const char *self, ckd_error *err) {
    bytes text = {.size = 0};
    *out = (peer_hosts){.items = calloc(PEER_HOSTS_MAX, sizeof(peer_host))};
    if (!out->items) {
        return err_nomem(err, PEER_HOSTS_MAX * sizeof(peer_host), "a list of nodes");
    }
    bool is_file = strchr(list, '/') || file_exists(list);
    ckd_status status = is_file ? file_read_all(&text, list, LIST_MAX, err) : CKD_OK;
    if (!is_file) {
        bytes_put(&text, list, strlen(list));
    }
    bytes_put_u8(&text, 0);
    if (status == CKD_OK && text.failed) {
        status = err_nomem(err, text.size, "a list of nodes");
    }
    THEN(status,
         parse(out, (char *)text.data, is_file ? "\n" : ",", is_file ? list : "the list of nodes", err));
    bytes_free(&text);
    THEN(status, find_self(out, self, err));
    if (status != CKD_OK) {
        peer_hosts_free(out);
    }
    return status;
}

ckd_status peer_hosts_alone(peer_hosts *out, ckd_error *err) {
    *out = (peer_hosts){.items = calloc(1, sizeof(*out->items)), .count = 1};
    if (!out->items) {
        *out = (peer_hosts){.count = 0};
        return err_nomem(err, sizeof(*out->items), "the list of nodes");
    }
    if (gethostname(out->items[0].name, sizeof(out->items[0].name) - 1) != 0 || !out->items[0].name[0]) {
        snprintf(out->items[0].name, sizeof(out->items[0].name), "localhost");
    }
    return CKD_OK;
}

void peer_hosts_free(peer_hosts *hosts) {
    free(hosts->items);
    *hosts = (peer_hosts){.count = 0};
}

/* ---- partners ---- */

static bool same_domain(const peer_hosts *h, size_t a, size_t b) {
    const char *x = h->items[a].domain, *y = h->items[b].domain;
    return x[0] || y[0] ? strcmp(x, y) == 0 : strcmp(h->items[a].host, h->items[b].host) == 0;
}

/*
 * Orders the nodes so that neighbours are of different domains where that is possible: first the first node of each
 * domain, then the second ones, and so on.
 */
static void order_by_domain(size_t *order, const peer_hosts *h) {
    size_t filled = 0;
    for (size_t round = 0; filled < h->count; round++) {
        for (size_t i = 0; i < h->count; i++) {
            size_t before = 0;
            for (size_t k = 0; k < i; k++) {
                before += same_domain(h, i, k);
            }
            if (before == round) {
                order[filled++] = i;
            }
        }
    }
}

static bool domain_is_new(const peer_hosts *h, const size_t *chosen, size_t count, size_t of,
                          size_t candidate) {
    bool fresh = !same_domain(h, of, candidate);
    for (size_t i = 0; i < count && fresh; i++) {
        fresh = !same_domain(h, chosen[i], candidate);
    }
    return fresh;
}

static bool is_chosen(const size_t *chosen, size_t count, size_t candidate) {
    for (size_t i = 0; i < count; i++) {
        if (chosen[i] == candidate) {
            return true;
        }
    }
    return false;
}

/* The candidates of the node at `at`: its group, then the nodes after it. The last group takes what is left over. */
static size_t candidate_at(size_t at, size_t n, size_t count, size_t group) {
    size_t groups = count / group > 0 ? count / group : 1;
    size_t first = at / group < groups ? at / group * group : (groups - 1) * group;
    size_t size = first + group * 2 > count ? count - first : group;
    size_t in_group = at - first;
    return n < size - 1 ? first + (in_group + 1 + n) % size : (first + size + (n - (size - 1))) % count;
}

size_t peer_hosts_group(size_t *out, const peer_hosts *hosts, size_t of, size_t size) {
    size_t order[PEER_HOSTS_MAX], at = 0;
    size_t groups = hosts->count / size;
    if (!groups) {
        return 0;
    }
    order_by_domain(order, hosts);
    while (order[at] != of) {
        at++;
    }
    size_t group = at / size < groups ? at / size : groups - 1;
    size_t first = group * size, end = group + 1 < groups ? first + size : hosts->count;
    memcpy(out, order + first, (end - first) * sizeof(*out));
    return end - first;
}

size_t peer_hosts_partners(size_t *out, const peer_hosts *hosts, size_t of, size_t copies,
                           peer_usable_fn usable, void *context) {
    size_t order[PEER_HOSTS_MAX], at = 0, count = 0;
    order_by_domain(order, hosts);
    while (order[at] != of) {
        at++;
    }
    for (int any_domain = 0; any_domain < 2; any_domain++) {
        for (size_t n = 0; n + 1 < hosts->count && count < copies; n++) {
            size_t candidate = order[candidate_at(at, n, hosts->count, copies + 1)];
            bool takes = candidate != of && !is_chosen(out, count, candidate) &&
                         (!usable || usable(context, candidate)) &&
                         (any_domain || domain_is_new(hosts, out, count, of, candidate));
            if (takes) {
                out[count++] = candidate;
            }
        }
    }
    return count;
}
