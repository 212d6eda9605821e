// Runs an all-reduce's messages on SimGrid's engine, over links and routes from a file that
// `weft-bench-sim export` has written; its platform.rs documents the format.
//
// The model is CM02 without cross-traffic, TCP's window or correcting factors: a message takes the
// route's latency, then shares bandwidth max-min fairly, as in weft-netsim. A rank is an actor
// whose mailboxes have a permanent receiver, so that a message is sent at once, before or after its
// receiver waits, as a counted write is.
//
// SimGrid shares by the inverse of a route's latency, and Weft equally: they agree for flows with
// equal latency on each link. SimGrid's default update mode ("Lazy") gives other rates than "Full"
// and "TI" at a few instants with simultaneous starts and ends, so the mode is an argument.
//
// Prints the virtual time when the last rank ends, and the processor time for the run and the
// setup.

#include <simgrid/s4u.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace sg = simgrid::s4u;

namespace {

struct Write {
    unsigned step;
    std::uint64_t bytes;
    sg::Mailbox* mailbox;
};

struct Wait {
    unsigned step;
    sg::Mailbox* mailbox;
};

struct Program {
    std::vector<Write> writes;
    std::vector<Wait> waits;
};

double cpu_seconds()
{
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <class Number> Number read(std::istream& file)
{
    Number number;
    if (!(file >> number))
        throw std::runtime_error("the file ends early, or has a word where a number should be");
    return number;
}

void run_rank(const Program& program)
{
    static char payload;
    auto wait = program.waits.begin();
    auto write = program.writes.begin();
    while (write != program.writes.end() || wait != program.waits.end()) {
        const bool writes_left = write != program.writes.end();
        if (writes_left && (wait == program.waits.end() || write->step <= wait->step)) {
            write->mailbox->put_init(&payload, write->bytes)->detach();
            ++write;
        } else {
            wait->mailbox->get<char>();
            ++wait;
        }
    }
}

} // namespace

int main(int count, char** arguments)
{
    const double begin = cpu_seconds();
    sg::Engine engine(&count, arguments);
    if (count != 3) {
        std::fprintf(stderr, "usage: %s FILE Lazy|Full|TI\n", arguments[0]);
        return 2;
    }
    for (const char* setting :
         {"network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0",
          "network/latency-factor:1", "network/bandwidth-factor:1", "network/weight-S:0",
          "contexts/factory:raw", "contexts/stack-size:32"})
        engine.set_config(setting);
    engine.set_config(std::string("network/optim:") + arguments[2]);

    std::ifstream file(arguments[1]);
    const auto ranks = read<unsigned>(file);
    const auto link_count = read<unsigned>(file);
    auto* zone = sg::create_full_zone("network");
    std::vector<sg::Link*> links;
    for (unsigned number = 0; number < link_count; ++number) {
        const auto bandwidth = read<double>(file);
        const auto latency = read<double>(file);
        auto* link = zone->create_link("link" + std::to_string(number), bandwidth);
        links.push_back(link->set_latency(latency)->seal());
    }
    std::vector<sg::Host*> hosts;
    for (unsigned rank = 0; rank < ranks; ++rank)
        hosts.push_back(zone->create_host("rank" + std::to_string(rank), 1e9)->seal());

    std::vector<Program> programs(ranks);
    std::map<std::pair<unsigned, unsigned>, sg::Mailbox*> mailboxes;
    for (unsigned rank = 0; rank < ranks; ++rank) {
        for (auto left = read<unsigned>(file); left > 0; --left) {
            const auto to = read<unsigned>(file);
            std::vector<sg::LinkInRoute> route;
            for (auto hops = read<unsigned>(file); hops > 0; --hops)
                route.emplace_back(links.at(read<unsigned>(file)));
            zone->add_route(hosts[rank]->get_netpoint(), hosts.at(to)->get_netpoint(), nullptr,
                            nullptr, route, false);
            const auto name = std::to_string(rank) + ">" + std::to_string(to);
            mailboxes[{rank, to}] = sg::Mailbox::by_name(name);
        }
        for (auto left = read<unsigned>(file); left > 0; --left) {
            const auto step = read<unsigned>(file);
            const auto to = read<unsigned>(file);
            const auto bytes = read<std::uint64_t>(file);
            programs[rank].writes.push_back({step, bytes, mailboxes.at({rank, to})});
        }
        for (auto left = read<unsigned>(file); left > 0; --left) {
            const auto step = read<unsigned>(file);
            const auto from = read<unsigned>(file);
            const auto name = std::to_string(from) + ">" + std::to_string(rank);
            programs[rank].waits.push_back({step, sg::Mailbox::by_name(name)});
        }
    }
    zone->seal();

    std::vector<sg::ActorPtr> actors;
    double last = 0;
    for (unsigned rank = 0; rank < ranks; ++rank) {
        const auto& program = programs[rank];
        actors.push_back(sg::Actor::create("rank", hosts[rank], [&program, &last] {
            run_rank(program);
            last = std::max(last, sg::Engine::get_clock());
        }));
    }
    for (const auto& [ends, mailbox] : mailboxes)
        mailbox->set_receiver(actors[ends.second]);

    const double built = cpu_seconds();
    engine.run();
    const double done = cpu_seconds();
    std::printf("{\"time_s\": %.17g, \"cpu_s\": %.9g, \"setup_cpu_s\": %.9g}\n", last, done - built,
                built - begin);
    return 0;
}
