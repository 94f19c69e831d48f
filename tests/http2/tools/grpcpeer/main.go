// Command grpcpeer is a gRPC client on a leash: it does what lines of JSON on stdin tell it and reports, as
// lines of JSON on stdout, what the server answers. The tests of the HTTP/2 port drive it.
//
//	{"op": "open", "id": 1, "method": "/pkg.Service/Method"}    a stream of raw messages
//	{"op": "send", "id": 1, "data": "<base64>"}                 one message
//	{"op": "done", "id": 1}                                     nothing more will be sent
//	{"op": "cancel", "id": 1}
//	{"op": "check" | "watch" | "list", "id": 2, "service": ""}  grpc.health.v1, by its own generated client
//
// Answers are {"id", "event", …}: "message" with data, "health" with statuses, "end" with code and text.
// The connection is closed when stdin ends.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

const largest = 64 << 20

type command struct {
	Op      string `json:"op"`
	ID      int    `json:"id"`
	Method  string `json:"method"`
	Service string `json:"service"`
	Data    []byte `json:"data"`
}

type event struct {
	ID     int               `json:"id"`
	Event  string            `json:"event"`
	Data   []byte            `json:"data"`
	Health map[string]string `json:"health,omitempty"`
	Code   int               `json:"code"`
	Text   string            `json:"text"`
}

// raw hands messages through as they are.
type raw struct{}

func (raw) Marshal(value any) ([]byte, error) { return *value.(*[]byte), nil }

func (raw) Unmarshal(data []byte, value any) error {
	*value.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func (raw) Name() string { return "proto" }

type call struct {
	outbox chan []byte
	cancel context.CancelFunc
}

type peer struct {
	connection *grpc.ClientConn
	health     grpc_health_v1.HealthClient
	calls      map[int]*call
	writing    sync.Mutex
	out        *json.Encoder
}

func (p *peer) tell(e event) {
	p.writing.Lock()
	defer p.writing.Unlock()
	if err := p.out.Encode(e); err != nil {
		os.Exit(1)
	}
}

func (p *peer) end(id int, err error) {
	if errors.Is(err, io.EOF) {
		err = nil
	}
	state := status.Convert(err)
	p.tell(event{ID: id, Event: "end", Code: int(state.Code()), Text: state.Message()})
}

func (p *peer) open(c command) {
	ctx, cancel := context.WithCancel(context.Background())
	opened := &call{outbox: make(chan []byte, 1024), cancel: cancel}
	p.calls[c.ID] = opened
	go p.run(ctx, c, opened)
}

func (p *peer) run(ctx context.Context, c command, opened *call) {
	both := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	stream, err := p.connection.NewStream(ctx, both, c.Method, grpc.ForceCodec(raw{}))
	if err != nil {
		p.end(c.ID, err)
		return
	}
	go write(stream, opened.outbox)
	for {
		var data []byte
		if err := stream.RecvMsg(&data); err != nil {
			p.end(c.ID, err)
			return
		}
		p.tell(event{ID: c.ID, Event: "message", Data: data})
	}
}

func write(stream grpc.ClientStream, outbox chan []byte) {
	for data := range outbox {
		if stream.SendMsg(&data) != nil {
			break // RecvMsg tells why
		}
	}
	_ = stream.CloseSend()
}

func (p *peer) check(c command) {
	answer, err := p.health.Check(context.Background(), &grpc_health_v1.HealthCheckRequest{Service: c.Service})
	if err == nil {
		p.tell(event{ID: c.ID, Event: "health", Health: map[string]string{c.Service: answer.Status.String()}})
	}
	p.end(c.ID, err)
}

func (p *peer) list(c command) {
	answer, err := p.health.List(context.Background(), &grpc_health_v1.HealthListRequest{})
	if err == nil {
		found := map[string]string{}
		for name, state := range answer.Statuses {
			found[name] = state.Status.String()
		}
		p.tell(event{ID: c.ID, Event: "health", Health: found})
	}
	p.end(c.ID, err)
}

func (p *peer) watch(c command) {
	ctx, cancel := context.WithCancel(context.Background())
	p.calls[c.ID] = &call{outbox: make(chan []byte), cancel: cancel}
	go func() {
		stream, err := p.health.Watch(ctx, &grpc_health_v1.HealthCheckRequest{Service: c.Service})
		for err == nil {
			var answer *grpc_health_v1.HealthCheckResponse
			if answer, err = stream.Recv(); err == nil {
				p.tell(event{ID: c.ID, Event: "health", Health: map[string]string{c.Service: answer.Status.String()}})
			}
		}
		p.end(c.ID, err)
	}()
}

func (p *peer) obey(c command) error {
	switch c.Op {
	case "open":
		p.open(c)
	case "send":
		p.calls[c.ID].outbox <- c.Data
	case "done":
		close(p.calls[c.ID].outbox)
	case "cancel":
		p.calls[c.ID].cancel()
	case "check":
		go p.check(c)
	case "list":
		go p.list(c)
	case "watch":
		p.watch(c)
	default:
		return fmt.Errorf("unknown op %q", c.Op)
	}
	return nil
}

func trust(authority string) (credentials.TransportCredentials, error) {
	if authority == "" {
		return insecure.NewCredentials(), nil
	}
	text, err := os.ReadFile(authority)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s holds no certificate", authority)
	}
	return credentials.NewTLS(&tls.Config{RootCAs: pool}), nil
}

func run() error {
	target := flag.String("target", "", "host:port")
	authority := flag.String("ca", "", "PEM file to trust; plaintext without it")
	flag.Parse()
	trusted, err := trust(*authority)
	if err != nil {
		return err
	}
	sizes := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(largest), grpc.MaxCallSendMsgSize(largest))
	connection, err := grpc.NewClient("passthrough:///"+*target, grpc.WithTransportCredentials(trusted), sizes)
	if err != nil {
		return err
	}
	defer connection.Close()
	p := &peer{
		connection: connection,
		health:     grpc_health_v1.NewHealthClient(connection),
		calls:      map[int]*call{},
		out:        json.NewEncoder(os.Stdout),
	}
	lines := json.NewDecoder(bufio.NewReaderSize(os.Stdin, 1<<20))
	for {
		var c command
		if err := lines.Decode(&c); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := p.obey(c); err != nil {
			return err
		}
	}
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "grpcpeer:", err)
		os.Exit(1)
	}
}
